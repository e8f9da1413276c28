"""From files to samples: streams, pipes, parsers and generators."""
