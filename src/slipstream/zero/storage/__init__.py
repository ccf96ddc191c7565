"""Where states are stored: device or host memory, files on disk, and the buffers that they stream through."""
