# gpupool_cuda_library(<target> DIRECTORY <name> SOURCES <files>… [LIBRARIES <static libraries>…]
#                      [HEADERS <names>…] [GRAPHS] [OLD_GLIBC])
#
# Builds ${CMAKE_BINARY_DIR}/<name>/libcuda.so.1: the sources, the front door and the generated
# exports. Beside it lies libcuda.so, a link: the name that linkers and some programs look for. It exports CUDA's names only and brings no C++ runtime library along. A function of the
# driver API is provided by defining it (extern "C"); what is not defined says so.
#
# GRAPHS: with stream capture, graphs and arrays (native/graphs); the sources define its hooks.
# OLD_GLIBC: compiled with PyPI's ziglang, so that the library loads on glibc 2.28; LIBRARIES are
# then paths of archives, and HEADERS the third-party headers below /usr/include that the sources
# use (files or directories: that directory itself must not be on this compiler's path).
# The target has the property GPUPOOL_LIBRARY: the library's path.

set(GPUPOOL_FRONTDOOR_SOURCES
  log.cc default_stream.cc proc_address.cc error_names.cc context_storage.cc selftest.cc
  export_tables.cc runtime_caller.cc visible_devices.cc images.cc own_memory.cc cubin.cc ptx_scan.cc)
list(TRANSFORM GPUPOOL_FRONTDOOR_SOURCES PREPEND ${CMAKE_SOURCE_DIR}/native/frontdoor/)
set(GPUPOOL_FRONTDOOR_SOURCES ${GPUPOOL_FRONTDOOR_SOURCES} CACHE INTERNAL "")
set(GPUPOOL_GRAPH_SOURCES graph.cc capture.cc api_capture.cc api_exec.cc api_graph.cc api_node.cc arrays.cc)
list(TRANSFORM GPUPOOL_GRAPH_SOURCES PREPEND ${CMAKE_SOURCE_DIR}/native/graphs/)
set(GPUPOOL_GRAPH_SOURCES ${GPUPOOL_GRAPH_SOURCES} CACHE INTERNAL "")
set(GPUPOOL_EXPORT_SOURCES
  ${GPUPOOL_GENERATED}/api/exports.cc ${GPUPOOL_GENERATED}/api/twins.cc CACHE INTERNAL "")
set(GPUPOOL_EXPORT_MAP ${GPUPOOL_GENERATED}/api/exports.map CACHE INTERNAL "")
set(GPUPOOL_CUDA_LIBRARY_DEFINITIONS GPUPOOL_CUDA_ABI_EXACT=1
  $<$<BOOL:${GPUPOOL_SELF_TEST_ANSWER}>:GPUPOOL_SELF_TEST_ANSWER=1> CACHE INTERNAL "")

# Compiled once for all libraries that this compiler builds.
add_library(gpupool_cuda_exports OBJECT EXCLUDE_FROM_ALL
  ${GPUPOOL_FRONTDOOR_SOURCES} ${GPUPOOL_EXPORT_SOURCES})
target_link_libraries(gpupool_cuda_exports PRIVATE gpupool_api)
target_compile_definitions(gpupool_cuda_exports PRIVATE ${GPUPOOL_CUDA_LIBRARY_DEFINITIONS})
target_compile_options(gpupool_cuda_exports PRIVATE -ftls-model=initial-exec)
gpupool_precompiled_headers(gpupool_cuda_exports GROUP cuda)

add_library(gpupool_cuda_graphs OBJECT EXCLUDE_FROM_ALL ${GPUPOOL_GRAPH_SOURCES})
target_link_libraries(gpupool_cuda_graphs PRIVATE gpupool_api)
target_compile_definitions(gpupool_cuda_graphs PRIVATE ${GPUPOOL_CUDA_LIBRARY_DEFINITIONS})
target_compile_options(gpupool_cuda_graphs PRIVATE -ftls-model=initial-exec)
gpupool_precompiled_headers(gpupool_cuda_graphs GROUP cuda)

function(gpupool_cuda_library target)
  cmake_parse_arguments(arg "GRAPHS;OLD_GLIBC" "DIRECTORY" "SOURCES;LIBRARIES;HEADERS" ${ARGN})
  set(directory ${CMAKE_BINARY_DIR}/${arg_DIRECTORY})
  file(MAKE_DIRECTORY ${directory})
  file(CREATE_LINK libcuda.so.1 ${directory}/libcuda.so SYMBOLIC)
  install(FILES ${directory}/libcuda.so DESTINATION ${arg_DIRECTORY} COMPONENT native)
  find_library(ZSTD_STATIC NAMES libzstd.a REQUIRED)
  find_library(LZ4_STATIC NAMES liblz4.a REQUIRED)
  list(APPEND arg_LIBRARIES ${ZSTD_STATIC} ${LZ4_STATIC})
  set(link_options -Wl,-soname,libcuda.so.1 -Wl,-Bsymbolic -Wl,--version-script=${GPUPOOL_EXPORT_MAP}
    -Wl,-z,now -Wl,-z,relro -Wl,-z,nodelete -Wl,-z,defs)
  if(arg_GRAPHS AND arg_OLD_GLIBC)
    list(APPEND arg_SOURCES ${GPUPOOL_GRAPH_SOURCES})
  elseif(arg_GRAPHS)
    list(APPEND arg_SOURCES $<TARGET_OBJECTS:gpupool_cuda_graphs>)
  endif()
  if(arg_OLD_GLIBC)
    gpupool_old_glibc_library(${target} OUTPUT ${directory}/libcuda.so.1
      SOURCES ${arg_SOURCES} ${GPUPOOL_FRONTDOOR_SOURCES} ${GPUPOOL_EXPORT_SOURCES}
      LIBRARIES ${arg_LIBRARIES} HEADERS ${arg_HEADERS} zstd.h zstd_errors.h lz4.h
      DEFINITIONS ${GPUPOOL_CUDA_LIBRARY_DEFINITIONS}
      LINK_OPTIONS ${link_options} LINK_DEPENDS ${GPUPOOL_EXPORT_MAP})
    return()
  endif()
  add_library(${target} SHARED ${arg_SOURCES} $<TARGET_OBJECTS:gpupool_cuda_exports>)
  target_link_libraries(${target} PRIVATE gpupool_api ${arg_LIBRARIES} Threads::Threads ${CMAKE_DL_LIBS})
  target_compile_definitions(${target} PRIVATE ${GPUPOOL_CUDA_LIBRARY_DEFINITIONS})
  target_compile_options(${target} PRIVATE -ftls-model=initial-exec)
  gpupool_precompiled_headers(${target} GROUP cuda)
  target_link_options(${target} PRIVATE ${link_options} -static-libstdc++ -static-libgcc
    -Wl,--exclude-libs,ALL)
  set_target_properties(${target} PROPERTIES PREFIX lib OUTPUT_NAME cuda SUFFIX .so.1 NO_SONAME ON
    LIBRARY_OUTPUT_DIRECTORY ${directory} LINK_DEPENDS ${GPUPOOL_EXPORT_MAP}
    GPUPOOL_LIBRARY ${directory}/libcuda.so.1)
endfunction()
