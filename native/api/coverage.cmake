# coverage.json: what each library defines of the driver API. Called when all targets exist.
function(gpupool_coverage)
  set(arguments "")
  set(libraries "")
  foreach(pair client:gpupool_client simulated:gpupool_simgpu quiet:gpupool_quiet)
    string(REPLACE ":" ";" pair ${pair})
    list(GET pair 0 kind)
    list(GET pair 1 target)
    if(TARGET ${target})
      get_target_property(library ${target} GPUPOOL_LIBRARY)
      list(APPEND arguments ${kind}=${library})
      get_target_property(type ${target} TYPE)
      if(type STREQUAL "UTILITY")
        list(APPEND libraries ${library})  # the file of a custom command
      else()
        list(APPEND libraries ${target})
      endif()
    endif()
  endforeach()
  set(output ${CMAKE_BINARY_DIR}/share/coverage.json)
  add_custom_command(OUTPUT ${output}
    COMMAND ${CMAKE_COMMAND} -E env PYTHONPATH=${CMAKE_SOURCE_DIR}/native/api PYTHONDONTWRITEBYTECODE=1
      ${Python3_EXECUTABLE} -m generator.coverage --description ${CMAKE_SOURCE_DIR}/native/api
      --nm ${CMAKE_NM} --output ${output} ${arguments}
    DEPENDS ${libraries} gpupool_generated ${CMAKE_SOURCE_DIR}/native/api/generator/coverage.py
    COMMENT "Listing what is covered of the driver API" VERBATIM)
  add_custom_target(gpupool_coverage ALL DEPENDS ${output})
  foreach(target gpupool_client gpupool_simgpu gpupool_quiet)
    if(TARGET ${target})
      add_dependencies(gpupool_coverage ${target})
    endif()
  endforeach()
  install(FILES ${output} DESTINATION share COMPONENT native)
endfunction()
