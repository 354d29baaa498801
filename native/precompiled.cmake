# gpupool_precompiled_headers(<target>… GROUP <name> [HEADERS <header>…]): the targets' sources are
# compiled with native/precompiled.h and the headers named. Targets of one group share one
# precompiled header, so they must have the same compile options (gcc says -Winvalid-pch when they
# have not, and reads the headers again).
function(gpupool_precompiled_headers)
  cmake_parse_arguments(PARSE_ARGV 0 arg "" "GROUP" "HEADERS")
  get_property(owner GLOBAL PROPERTY GPUPOOL_PRECOMPILED_${arg_GROUP})
  foreach(target ${arg_UNPARSED_ARGUMENTS})
    if(owner)
      target_precompile_headers(${target} REUSE_FROM ${owner})
    else()
      target_precompile_headers(${target} PRIVATE ${CMAKE_SOURCE_DIR}/native/precompiled.h ${arg_HEADERS})
      set(owner ${target})
      set_property(GLOBAL PROPERTY GPUPOOL_PRECOMPILED_${arg_GROUP} ${owner})
    endif()
  endforeach()
endfunction()
