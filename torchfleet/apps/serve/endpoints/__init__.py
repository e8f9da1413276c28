"""The endpoints of `fleet serve`: the Open Inference Protocol over HTTP and gRPC."""
