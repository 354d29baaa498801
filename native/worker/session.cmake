# gpupool_session: what serves one session, without the program around it. (Included by
# CMakeLists.txt.)
add_library(gpupool_session STATIC admission.cc bookkeeper.cc books.cc driver.cc frames.cc host_functions.cc
  lent_bulk.cc memory.cc
  operations_context.cc operations_copy.cc operations_graph.cc operations_host_function.cc
  operations_launch.cc operations_link.cc operations_memory.cc operations_module.cc
  operations_stream.cc operations_virtual_memory.cc output_capture.cc session.cc
  session_books.cc session_bulk.cc staging.cc virtual_memory.cc ${GPUPOOL_GENERATED}/worker/plain.cc)
target_link_libraries(gpupool_session PUBLIC gpupool_api gpupool_wire gpupool_carriers
  gpupool_images ${CMAKE_DL_LIBS} Threads::Threads)
gpupool_precompiled_headers(gpupool_session GROUP plain)
