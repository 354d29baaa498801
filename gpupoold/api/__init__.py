"""The gRPC interface (gpupool.proto): server, views, peer credentials."""
