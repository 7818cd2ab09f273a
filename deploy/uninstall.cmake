# SPDX-License-Identifier: Apache-2.0
# Removes what `cmake --install BUILD` wrote, and nothing else:
#   cmake -D MANIFEST=BUILD/install_manifest.txt -P deploy/uninstall.cmake
if(NOT EXISTS "${MANIFEST}")
  message(FATAL_ERROR "no manifest at '${MANIFEST}'; pass -D MANIFEST=<build>/install_manifest.txt")
endif()
file(STRINGS "${MANIFEST}" installed)
foreach(path IN LISTS installed)
  if(EXISTS "$ENV{DESTDIR}${path}" OR IS_SYMLINK "$ENV{DESTDIR}${path}")
    file(REMOVE "$ENV{DESTDIR}${path}")
    message(STATUS "removed $ENV{DESTDIR}${path}")
  endif()
endforeach()
