"""Where state lives that is not on the device: so far the asynchronous file I/O under the NVMe tier."""
