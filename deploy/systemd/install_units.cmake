# SPDX-License-Identifier: Apache-2.0
# Run by `cmake --install`, which sets CMAKE_INSTALL_PREFIX; UNIT_SOURCE and UNIT_SCRATCH come from
# deploy/CMakeLists.txt. file(INSTALL) honours DESTDIR and writes the manifest for uninstalling.
set(bindir "${CMAKE_INSTALL_PREFIX}/bin")
set(sharedir "${CMAKE_INSTALL_PREFIX}/share/isthmus")
set(docdir "${CMAKE_INSTALL_PREFIX}/share/doc/isthmus")
foreach(unit IN ITEMS isthmus-router.service isthmus-prefill@.service isthmus-decode@.service)
  # No @-substitution by configure_file: "isthmus-prefill@0" and "@system-service" are systemd's.
  file(READ "${UNIT_SOURCE}/${unit}.in" text)
  foreach(name IN ITEMS bindir sharedir docdir)
    string(REPLACE "@${name}@" "${${name}}" text "${text}")
  endforeach()
  file(WRITE "${UNIT_SCRATCH}/${unit}" "${text}")
  file(INSTALL "${UNIT_SCRATCH}/${unit}" DESTINATION "${CMAKE_INSTALL_PREFIX}/lib/systemd/system")
endforeach()
file(INSTALL "${UNIT_SOURCE}/isthmus.sysusers.conf"
     DESTINATION "${CMAKE_INSTALL_PREFIX}/lib/sysusers.d" RENAME isthmus.conf)
