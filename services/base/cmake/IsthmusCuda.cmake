# SPDX-License-Identifier: Apache-2.0
# How `.cu` files become objects, chosen by ISTHMUS_CUDA:
#   off       they are not compiled; the tables of variants have no CUDA row that can be launched;
#   emulated  the C++ compiler takes them as C++, and kernels/core/emulator/ runs them on the CPU;
#   nvcc      nvcc compiles them for every architecture in ISTHMUS_CUDA_ARCHS.
# Included by IsthmusTargets.cmake.

set(ISTHMUS_CUDA off CACHE STRING "How .cu files are compiled: off, emulated or nvcc")
set_property(CACHE ISTHMUS_CUDA PROPERTY STRINGS off emulated nvcc)
set(ISTHMUS_CUDA_ARCHS "90a;120a" CACHE STRING "What nvcc compiles for, as in sm_90a")
if(NOT ISTHMUS_CUDA MATCHES "^(off|emulated|nvcc)$")
  message(FATAL_ERROR "ISTHMUS_CUDA is \"${ISTHMUS_CUDA}\"; it must be off, emulated or nvcc")
endif()

# What host code of CUDA needs: the runtime, the emulator's fibers, or nothing.
add_library(isthmus_cuda_runtime INTERFACE)

if(NOT ISTHMUS_CUDA STREQUAL "off")
  add_compile_definitions(ISTHMUS_HAS_CUDA=1)
endif()

if(ISTHMUS_CUDA STREQUAL "emulated")
  find_package(Boost REQUIRED COMPONENTS context)
  target_link_libraries(isthmus_cuda_runtime INTERFACE Boost::context)
  add_compile_definitions(ISTHMUS_EMULATED=1)
endif()

if(ISTHMUS_CUDA STREQUAL "nvcc")
  find_program(ISTHMUS_NVCC nvcc PATHS /usr/local/cuda-13.0/bin /usr/local/cuda/bin REQUIRED)
  execute_process(COMMAND ${ISTHMUS_NVCC} --version OUTPUT_VARIABLE nvcc_version)
  if(NOT nvcc_version MATCHES "release 13\\.")
    message(FATAL_ERROR "${ISTHMUS_NVCC} is not of CUDA 13: ${nvcc_version}")
  endif()
  # nvcc itself says where its toolkit lies, since it may be a link or a script. An installed one
  # has lib64, NVIDIA's wheels on PyPI have lib.
  execute_process(COMMAND ${ISTHMUS_NVCC} -v --dryrun none.cu ERROR_VARIABLE said OUTPUT_QUIET)
  if(NOT said MATCHES "#. TOP=([^\r\n]*)")
    message(FATAL_ERROR "${ISTHMUS_NVCC} does not say where its toolkit is: ${said}")
  endif()
  get_filename_component(toolkit ${CMAKE_MATCH_1} REALPATH)
  find_library(ISTHMUS_CUDART libcudart_static.a REQUIRED NO_DEFAULT_PATH NO_CACHE
               PATHS ${toolkit}/lib64 ${toolkit}/lib ${toolkit}/targets/x86_64-linux/lib)
  target_include_directories(isthmus_cuda_runtime SYSTEM INTERFACE ${toolkit}/include)
  target_link_libraries(isthmus_cuda_runtime INTERFACE ${ISTHMUS_CUDART} dl rt Threads::Threads)

  # NCCL, for tensor parallelism over several devices; optional.
  set(ISTHMUS_NCCL_ROOT "" CACHE PATH "A folder with include/nccl.h and lib/libnccl.so")
  find_path(ISTHMUS_NCCL_INCLUDE nccl.h NO_CACHE
            HINTS ${ISTHMUS_NCCL_ROOT}/include ${toolkit}/include ${toolkit}/../nccl/include)
  find_library(ISTHMUS_NCCL NAMES nccl libnccl.so.2 NO_CACHE
               HINTS ${ISTHMUS_NCCL_ROOT}/lib ${toolkit}/lib64 ${toolkit}/lib
                     ${toolkit}/../nccl/lib)
  if(ISTHMUS_NCCL AND ISTHMUS_NCCL_INCLUDE)
    add_library(isthmus_nccl INTERFACE)
    target_include_directories(isthmus_nccl SYSTEM INTERFACE ${ISTHMUS_NCCL_INCLUDE})
    target_link_libraries(isthmus_nccl INTERFACE ${ISTHMUS_NCCL} isthmus_cuda_runtime)
    target_compile_definitions(isthmus_nccl INTERFACE ISTHMUS_HAS_NCCL=1)
  endif()

  # No contraction behind our back, as on the CPU: who wants an FMA writes one. -lineinfo costs
  # nothing at run time and lets profilers and sanitizers name lines.
  set(ISTHMUS_NVCC_FLAGS -std=c++20 -O3 -lineinfo -fmad=false --expt-relaxed-constexpr
      -Werror all-warnings -Xptxas -v
      -Xcompiler -Wall,-Wextra,-Werror,-ffp-contract=off,-fno-omit-frame-pointer)
  # ccache would preprocess for one architecture and miss what the others see, so it must take the
  # included files themselves into its hash (depend mode).
  if(ISTHMUS_COMPILER_LAUNCHER)
    set(ISTHMUS_NVCC_LAUNCHER ${ISTHMUS_COMPILER_LAUNCHER})
    list(INSERT ISTHMUS_NVCC_LAUNCHER 3 CCACHE_DEPEND=true)
  endif()
  foreach(arch IN LISTS ISTHMUS_CUDA_ARCHS)
    list(APPEND ISTHMUS_NVCC_FLAGS -gencode arch=compute_${arch},code=sm_${arch})
  endforeach()
endif()

add_custom_target(cuda_objects)  # All that nvcc compiles.

# isthmus_nvcc_object(<target> <source>): one object of the target. CMake's own CUDA language is not
# used: version 3.25 knows neither sm_120a nor the folders of the wheels, and it does not keep what
# ptxas reports, which lands beside the object in <source>.ptxas (tests/compile_facts/).
function(isthmus_nvcc_object target source)
  get_filename_component(source ${source} ABSOLUTE)
  file(RELATIVE_PATH name ${CMAKE_CURRENT_SOURCE_DIR} ${source})
  set(object ${CMAKE_CURRENT_BINARY_DIR}/${target}.cuda/${name}.o)
  set(report ${CMAKE_CURRENT_BINARY_DIR}/${target}.cuda/${name}.ptxas)
  get_filename_component(folder ${object} DIRECTORY)
  file(MAKE_DIRECTORY ${folder})
  set(definitions $<TARGET_PROPERTY:${target},COMPILE_DEFINITIONS>)
  set(all_folders $<TARGET_PROPERTY:${target},INCLUDE_DIRECTORIES>)
  set(folders $<FILTER:${all_folders},EXCLUDE,^\(/usr/include|${PROJECT_SOURCE_DIR}\)$>)
  add_custom_command(
    OUTPUT ${object}
    BYPRODUCTS ${report}
    COMMAND ${PROJECT_SOURCE_DIR}/services/base/cmake/nvcc_with_report ${report}
            ${ISTHMUS_NVCC_LAUNCHER} ${ISTHMUS_NVCC} ${ISTHMUS_NVCC_FLAGS}
            -ccbin ${CMAKE_CXX_COMPILER} "-D$<JOIN:${definitions},;-D>" -I${PROJECT_SOURCE_DIR}
            "$<$<BOOL:${folders}>:-isystem;$<JOIN:${folders},;-isystem;>>"
            -MD -MT ${object} -MF ${object}.d -c ${source} -o ${object}
    DEPENDS ${source} ${PROJECT_SOURCE_DIR}/services/base/cmake/nvcc_with_report
    DEPFILE ${object}.d
    COMMENT "Compiling ${name} with nvcc"
    COMMAND_EXPAND_LISTS VERBATIM)
  set_source_files_properties(${object} PROPERTIES GENERATED TRUE EXTERNAL_OBJECT TRUE)
  target_sources(${target} PRIVATE ${object})
  set_property(TARGET ${target} APPEND PROPERTY ISTHMUS_CUDA_OBJECTS ${object})
  get_target_property(type ${target} TYPE)
  if(NOT type STREQUAL "EXECUTABLE")  # Kernels of tests are nobody's burden.
    set_property(GLOBAL APPEND_STRING PROPERTY ISTHMUS_PTXAS_REPORTS "${source} ${report}\n")
  endif()
endfunction()

# Called last of all: writes ptxas_reports, a line "<source> <report>" per object of the libraries.
function(isthmus_list_ptxas_reports)
  get_property(reports GLOBAL PROPERTY ISTHMUS_PTXAS_REPORTS)
  file(WRITE ${PROJECT_BINARY_DIR}/ptxas_reports "${reports}")
endfunction()

# isthmus_cuda_sources(<target> <a.cu> ...): adds them as ISTHMUS_CUDA says.
function(isthmus_cuda_sources target)
  if(ISTHMUS_CUDA STREQUAL "off" OR NOT ARGN)
    return()
  endif()
  if(ISTHMUS_CUDA STREQUAL "emulated")
    set_source_files_properties(${ARGN} PROPERTIES LANGUAGE CXX)  # Adds -x c++ (CMP0119).
    target_sources(${target} PRIVATE ${ARGN})
  else()
    foreach(source IN LISTS ARGN)
      isthmus_nvcc_object(${target} ${source})
    endforeach()
    get_target_property(objects ${target} ISTHMUS_CUDA_OBJECTS)
    add_custom_target(${target}_cuda DEPENDS ${objects})
    add_dependencies(${target} ${target}_cuda)
    add_dependencies(cuda_objects ${target}_cuda)
  endif()
  get_target_property(type ${target} TYPE)
  if(type STREQUAL "EXECUTABLE")
    target_link_libraries(${target} PRIVATE isthmus_cuda_runtime)
  else()
    target_link_libraries(${target} PUBLIC isthmus_cuda_runtime)
  endif()
endfunction()
