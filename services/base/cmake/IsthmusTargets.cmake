# SPDX-License-Identifier: Apache-2.0
# Compiler settings and the three target helpers. A target names its layer, and the helper refuses
# an upward or sideways dependency at configure time (ARCHITECTURE.md, "Folders").

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE RelWithDebInfo CACHE STRING "" FORCE)
endif()
# -O2 -g1: optimised, with line tables for stack traces and profiles, small enough for two cores.
set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O2 -g1")
find_program(ISTHMUS_CCACHE ccache)
if(ISTHMUS_CCACHE)
  # Paths relative to the source and no folder in the hash, so that the build folders of one tree
  # (release, demo, without RPC) share what they compile alike.
  set(ISTHMUS_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_NOHASHDIR=true
                                CCACHE_BASEDIR=${PROJECT_SOURCE_DIR} ${ISTHMUS_CCACHE})
  set(CMAKE_CXX_COMPILER_LAUNCHER ${ISTHMUS_COMPILER_LAUNCHER})
endif()

# One floor for all machines: FMA and F16C always exist, so every SIMD target rounds alike; nothing
# is contracted behind our back (kernels/decisions/0001-summation-order.md). Kernels hold pragmas of
# CUDA; that is said for every build, so that ccache shares between them what they share.
add_compile_options(-Wall -Wextra -Wshadow -Werror -Wno-unknown-pragmas -march=x86-64-v3 -maes
                    -mpclmul -ffp-contract=off -fno-omit-frame-pointer)
if(CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
  # libstdc++ 12's own std::stable_sort uses a function that it deprecates.
  add_compile_options(-Wno-deprecated-declarations)
endif()
add_compile_definitions(HWY_DISABLED_TARGETS=HWY_AVX3_DL)
if(ISTHMUS_SANITIZE)
  set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O1 -g1")
  add_compile_options(-fsanitize=${ISTHMUS_SANITIZE} -fno-sanitize-recover=all)
  add_link_options(-fsanitize=${ISTHMUS_SANITIZE})
endif()
if(ISTHMUS_BUILD_FUZZERS)
  add_compile_options(-fsanitize=fuzzer-no-link)  # Coverage of the libraries under a fuzz target.
endif()
if(ISTHMUS_CHECK_INVARIANTS OR CMAKE_BUILD_TYPE STREQUAL "Debug" OR ISTHMUS_SANITIZE)
  add_compile_definitions(ISTHMUS_CHECK_INVARIANTS=1)
endif()

include(IsthmusCuda)

function(isthmus_check_layers name layer)
  foreach(dep IN LISTS ARGN)
    if(TARGET ${dep})
      get_target_property(dep_layer ${dep} ISTHMUS_LAYER)
      if(NOT dep_layer STREQUAL "dep_layer-NOTFOUND" AND NOT dep_layer LESS layer)
        message(FATAL_ERROR "${name} (layer ${layer}) may not use ${dep} (layer ${dep_layer})")
      endif()
    endif()
  endforeach()
endfunction()

# isthmus_library(<name> LAYER <n> SRCS ... [CUDA_SRCS a.cu ...] [DEPS ...])
function(isthmus_library name)
  cmake_parse_arguments(PARSE_ARGV 1 ARG "" "LAYER" "SRCS;CUDA_SRCS;DEPS")
  add_library(${name} STATIC ${ARG_SRCS})
  set_target_properties(${name} PROPERTIES ISTHMUS_LAYER ${ARG_LAYER})
  isthmus_cuda_sources(${name} ${ARG_CUDA_SRCS})
  target_include_directories(${name} PUBLIC ${PROJECT_SOURCE_DIR})
  target_link_libraries(${name} PUBLIC ${ARG_DEPS})
  isthmus_check_layers(${name} ${ARG_LAYER} ${ARG_DEPS})
endfunction()

# isthmus_program(<name> LAYER <n> SRCS ... [DEPS ...]): an installed executable.
function(isthmus_program name)
  cmake_parse_arguments(PARSE_ARGV 1 ARG "" "LAYER" "SRCS;DEPS")
  add_executable(${name} ${ARG_SRCS})
  set_target_properties(${name} PROPERTIES ISTHMUS_LAYER ${ARG_LAYER})
  target_link_libraries(${name} PRIVATE ${ARG_DEPS})
  isthmus_check_layers(${name} ${ARG_LAYER} ${ARG_DEPS})
  install(TARGETS ${name} RUNTIME DESTINATION bin)
endfunction()

# isthmus_test(<name> LABEL <label> SRCS ... [CUDA_SRCS a.cu ...] [DEPS ...] [TIMEOUT <s>]): one
# GoogleTest binary, one CTest test. One CTest entry per binary keeps start-up cost low; `tests/run`
# counts the cases inside.
function(isthmus_test name)
  if(NOT ISTHMUS_BUILD_TESTS)
    return()
  endif()
  cmake_parse_arguments(PARSE_ARGV 1 ARG "" "LABEL;TIMEOUT" "SRCS;CUDA_SRCS;DEPS;ENV")
  add_executable(${name} ${ARG_SRCS})
  isthmus_cuda_sources(${name} ${ARG_CUDA_SRCS})
  target_link_libraries(${name} PRIVATE ${ARG_DEPS} GTest::gtest GTest::gmock GTest::gtest_main)
  target_compile_definitions(${name} PRIVATE ISTHMUS_SOURCE_DIR="${PROJECT_SOURCE_DIR}")
  add_test(NAME ${name} COMMAND ${name})
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 600)
  endif()
  set_tests_properties(${name} PROPERTIES LABELS "${ARG_LABEL}" TIMEOUT ${ARG_TIMEOUT}
                       ENVIRONMENT "${ARG_ENV}")
endfunction()

# isthmus_cuda_test(<name> SRCS ... [CUDA_SRCS a.cu ...] [DEPS ...] [TIMEOUT <s>]): a test of CUDA
# code, on the CPU where CUDA is emulated, on the device where nvcc compiles it, else left out. Its
# labels are unit and cuda.
function(isthmus_cuda_test name)
  if(NOT ISTHMUS_CUDA STREQUAL "off")
    isthmus_test(${name} LABEL "unit;cuda" ${ARGN})
  endif()
endfunction()

# isthmus_fuzz(<name> SRCS ... [DEPS ...]): a libFuzzer target, built only with clang.
function(isthmus_fuzz name)
  if(NOT ISTHMUS_BUILD_FUZZERS)
    return()
  endif()
  cmake_parse_arguments(PARSE_ARGV 1 ARG "" "" "SRCS;DEPS")
  add_executable(${name} ${ARG_SRCS})
  target_compile_options(${name} PRIVATE -fsanitize=fuzzer)
  target_link_options(${name} PRIVATE -fsanitize=fuzzer)
  target_link_libraries(${name} PRIVATE ${ARG_DEPS})
endfunction()
