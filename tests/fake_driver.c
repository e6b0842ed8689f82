/* A libcuda.so.1 without a device: it accepts any binary and writes each launch to $FAKE_DRIVER_LOG.
   It lets tests hold our launch path against the C launcher of whichever Triton is installed. */
#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>

CUresult cuGetErrorString(CUresult error, const char **text) { *text = "fake"; return CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *context) { *context = (CUcontext)1; return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { *value = 0; return CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { *device = ordinal; return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { *context = (CUcontext)1; return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) { *version = 12080; return CUDA_SUCCESS; }
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }
CUresult cuModuleLoadData(CUmodule *module, const void *image) { *module = (CUmodule)2; return CUDA_SUCCESS; }

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  *function = (CUfunction)0x42;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
  *value = attribute == CU_DEVICE_ATTRIBUTE_WARP_SIZE ? 32 : atoi(getenv("FAKE_DRIVER_SHARED"));
  return CUDA_SUCCESS;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
  *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
  *(CUdeviceptr *)data = pointer;
  return CUDA_SUCCESS;
}

/* The kernel's arguments: three pointers, an i32, an fp32, an i64, then Triton's two scratch pointers. */
CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **arguments, void **extra) {
  FILE *log = fopen(getenv("FAKE_DRIVER_LOG"), "a");
  fprintf(log, "grid %u %u %u threads %u shared %u stream %llu function %llu", config->gridDimX, config->gridDimY,
          config->gridDimZ, config->blockDimX, config->sharedMemBytes, (unsigned long long)config->hStream,
          (unsigned long long)function);
  for (int i = 0; i < 3; ++i) fprintf(log, " %llu", *(unsigned long long *)arguments[i]);
  fprintf(log, " %d %g %lld", *(int *)arguments[3], *(float *)arguments[4], *(long long *)arguments[5]);
  fprintf(log, " scratch %llu %llu\n", *(unsigned long long *)arguments[6], *(unsigned long long *)arguments[7]);
  fclose(log);
  return CUDA_SUCCESS;
}
