/* A CUDA driver and runtime with eight devices on which nothing can run, for a CUDA build of torch on
 * a machine without one. Autograd asks how many devices there are, which one is current and whether
 * it has a context before it hands a gradient back; fake tensors ask for nothing more. */
int cudaGetDeviceCount(int *count) { *count = 8; return 0; }
int cudaGetDevice(int *device) { *device = 0; return 0; }
int cudaSetDevice(int device) { return 0; }
int cudaGetLastError(void) { return 0; }
int cudaPeekAtLastError(void) { return 0; }
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = 0; *active = 0; return 0; }
