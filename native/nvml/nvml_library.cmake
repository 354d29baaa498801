# gpupool_nvml_library(<target> DIRECTORY <name> SOURCES <files>… [LIBRARIES <static libraries>…]
#                      [HEADERS <names>…] [OLD_GLIBC])
#
# Builds ${CMAKE_BINARY_DIR}/<name>/libnvidia-ml.so.1, with the link libnvidia-ml.so beside it. It has
# every function of NVML; the sources say what devices there are (nvml/library.h) and define what only
# they can answer. OLD_GLIBC, HEADERS and
# the property GPUPOOL_LIBRARY: as gpupool_cuda_library's.

set(GPUPOOL_NVML_SOURCES
  ${CMAKE_CURRENT_LIST_DIR}/library.cc ${CMAKE_CURRENT_LIST_DIR}/device.cc ${CMAKE_CURRENT_LIST_DIR}/exports.cc
  CACHE INTERNAL "")
set(GPUPOOL_NVML_MAP ${CMAKE_CURRENT_LIST_DIR}/nvml.map CACHE INTERNAL "")

function(gpupool_nvml_library target)
  cmake_parse_arguments(arg "OLD_GLIBC" "DIRECTORY" "SOURCES;LIBRARIES;HEADERS" ${ARGN})
  set(directory ${CMAKE_BINARY_DIR}/${arg_DIRECTORY})
  file(MAKE_DIRECTORY ${directory})
  file(CREATE_LINK libnvidia-ml.so.1 ${directory}/libnvidia-ml.so SYMBOLIC)
  install(FILES ${directory}/libnvidia-ml.so DESTINATION ${arg_DIRECTORY} COMPONENT native)
  set(link_options -Wl,-soname,libnvidia-ml.so.1 -Wl,-Bsymbolic -Wl,--version-script=${GPUPOOL_NVML_MAP}
    -Wl,-z,now -Wl,-z,relro -Wl,-z,nodelete -Wl,-z,defs)
  if(arg_OLD_GLIBC)
    gpupool_old_glibc_library(${target} OUTPUT ${directory}/libnvidia-ml.so.1
      SOURCES ${arg_SOURCES} ${GPUPOOL_NVML_SOURCES} LIBRARIES ${arg_LIBRARIES} HEADERS ${arg_HEADERS}
      LINK_OPTIONS ${link_options} LINK_DEPENDS ${GPUPOOL_NVML_MAP})
    return()
  endif()
  add_library(${target} SHARED ${arg_SOURCES} ${GPUPOOL_NVML_SOURCES})
  target_link_libraries(${target} PRIVATE ${arg_LIBRARIES} Threads::Threads ${CMAKE_DL_LIBS})
  gpupool_precompiled_headers(${target} GROUP plain)
  target_link_options(${target} PRIVATE ${link_options} -static-libstdc++ -static-libgcc
    -Wl,--exclude-libs,ALL)
  set_target_properties(${target} PROPERTIES PREFIX lib OUTPUT_NAME nvidia-ml SUFFIX .so.1 NO_SONAME ON
    LIBRARY_OUTPUT_DIRECTORY ${directory} LINK_DEPENDS ${GPUPOOL_NVML_MAP}
    GPUPOOL_LIBRARY ${directory}/libnvidia-ml.so.1)
endfunction()
