# gpupool_old_glibc_library(<target> OUTPUT <path> SOURCES <files>… [LIBRARIES <archives>…]
#   [HEADERS <names>…] [DEFINITIONS <definitions>…] [LINK_OPTIONS <options>…] [LINK_DEPENDS <files>…]
#   [PROGRAM])
#
# A shared library, or with PROGRAM a program, that loads on glibc 2.28, compiled with PyPI's ziglang.
# HEADERS are the third-party headers below /usr/include that the sources use (files or directories:
# that directory itself must not be on this compiler's path). The target has the property
# GPUPOOL_LIBRARY: the library's path.
function(gpupool_old_glibc_library target)
  cmake_parse_arguments(arg "PROGRAM" "OUTPUT" "SOURCES;LIBRARIES;HEADERS;DEFINITIONS;LINK_OPTIONS;LINK_DEPENDS" ${ARGN})
  execute_process(COMMAND ${Python3_EXECUTABLE} -c "import ziglang" RESULT_VARIABLE no_zig ERROR_QUIET)
  if(no_zig)
    message(FATAL_ERROR "The client library is compiled with PyPI's ziglang, which ${Python3_EXECUTABLE} "
      "doesn't have. Install it, or set GPUPOOL_CLIENT_OLD_GLIBC=OFF for a library for this machine only.")
  endif()
  set(vendor ${CMAKE_CURRENT_BINARY_DIR}/${target}.include)
  file(MAKE_DIRECTORY ${vendor})
  foreach(header ${arg_HEADERS})
    find_path(found_${header} ${header} REQUIRED NO_CACHE)
    file(CREATE_LINK ${found_${header}}/${header} ${vendor}/${header} SYMBOLIC)
  endforeach()
  set(compiler ${Python3_EXECUTABLE} -m ziglang c++ -target x86_64-linux-gnu.2.28)
  set(flags -std=c++20 -O2 $<$<CONFIG:RelWithDebInfo>:-g1> -fPIC -fvisibility=hidden -fvisibility-inlines-hidden
    -ftls-model=initial-exec -fno-sanitize=undefined -Wall -Wextra -Wno-missing-field-initializers
    -Wno-nullability-completeness)
  foreach(definition ${arg_DEFINITIONS})
    list(APPEND flags $<$<BOOL:${definition}>:-D${definition}>)
  endforeach()
  set(objects "")
  set(precompiled ${CMAKE_CURRENT_BINARY_DIR}/${target}.objects/precompiled.pch)
  set(use_precompiled -include-pch ${precompiled})
  add_custom_command(OUTPUT ${precompiled}
    COMMAND ${compiler} ${flags}
      -x c++-header ${CMAKE_SOURCE_DIR}/native/precompiled.h -o ${precompiled}
    DEPENDS ${CMAKE_SOURCE_DIR}/native/precompiled.h COMMAND_EXPAND_LISTS VERBATIM
    COMMENT "Precompiling headers for glibc 2.28")
  if(CMAKE_DISABLE_PRECOMPILE_HEADERS)
    set(precompiled "")
    set(use_precompiled "")
  endif()
  foreach(source ${arg_SOURCES})
    get_filename_component(source ${source} ABSOLUTE)
    string(MD5 hash ${source})
    string(SUBSTRING ${hash} 0 8 hash)
    get_filename_component(name ${source} NAME_WE)
    set(object ${CMAKE_CURRENT_BINARY_DIR}/${target}.objects/${name}.${hash}.o)
    add_custom_command(OUTPUT ${object}
      COMMAND ${compiler} ${flags}
        -I${CMAKE_SOURCE_DIR}/native -I${GPUPOOL_GENERATED} -I${vendor}
        ${use_precompiled} -MD -MF ${object}.d -c ${source} -o ${object}
      DEPENDS ${source} ${precompiled} gpupool_generated DEPFILE ${object}.d COMMAND_EXPAND_LISTS VERBATIM
      COMMENT "Compiling ${name} for glibc 2.28")
    list(APPEND objects ${object})
  endforeach()
  file(MAKE_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/${target}.objects)
  # zig brings its C++ library, built the first time for these options (one to three minutes of one
  # core) and then cached. It ends up inside, hidden by the version script; -O2: without debug checks.
  add_custom_command(OUTPUT ${arg_OUTPUT}
    COMMAND ${compiler} -O2 $<$<NOT:$<BOOL:${arg_PROGRAM}>>:-shared> -o ${arg_OUTPUT} ${objects} ${arg_LIBRARIES} ${arg_LINK_OPTIONS} -lpthread -ldl
    DEPENDS ${objects} ${arg_LINK_DEPENDS} COMMAND_EXPAND_LISTS VERBATIM
    COMMENT "Linking ${arg_OUTPUT} for glibc 2.28")
  add_custom_target(${target} ALL DEPENDS ${arg_OUTPUT})
  set_target_properties(${target} PROPERTIES GPUPOOL_LIBRARY ${arg_OUTPUT})
endfunction()
