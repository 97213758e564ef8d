// libcuda.so.1 for a machine without a GPU: it answers what Mosaic GPU's compiler asks, as an H100 would, and prints what a kernel
// asks of the driver. Nothing runs.
#include <stdint.h>
#include <stdio.h>

enum { SUCCESS = 0, INVALID_VALUE = 1, NOT_FOUND = 500 };
enum { CAPABILITY_MAJOR = 75, CAPABILITY_MINOR = 76, DYNAMIC_SHARED_BYTES = 8 };

static int thing; // what every handle points to

int cuInit(unsigned flags) { return SUCCESS; }
int cuDriverGetVersion(int *version) { *version = 13000; return SUCCESS; }
int cuDeviceGetCount(int *count) { *count = 1; return SUCCESS; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return SUCCESS; }
int cuCtxGetDevice(int *device) { *device = 0; return SUCCESS; }
int cuCtxGetCurrent(void **context) { *context = &thing; return SUCCESS; }
int cuGetErrorString(int error, const char **text) { *text = "an error"; return SUCCESS; }
int cuModuleLoadData(void **module, const void *image) { *module = &thing; return SUCCESS; }
int cuModuleGetFunction(void **function, void *module, const char *name) { *function = &thing; return SUCCESS; }
int cuModuleGetGlobal_v2(void **at, size_t *size, void *module, const char *name) { return NOT_FOUND; }

int cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = attribute == CAPABILITY_MAJOR ? 9 : 0;
  return SUCCESS;
}

int cuFuncSetAttribute(void *function, int attribute, int value) {
  if (attribute == DYNAMIC_SHARED_BYTES) printf("shared %d\n", value);
  return SUCCESS;
}

// A tensor map's rules, as CUDA's documentation gives them for maps that are not interleaved.
int cuTensorMapEncodeTiled(void *map, int type, uint32_t rank, void *address, const uint64_t *sizes, const uint64_t *strides,
                           const uint32_t *box, const uint32_t *steps, int interleave, int swizzle, int promotion, int fill) {
  static const int widest[] = {1 << 20, 32, 64, 128}; // bytes of the innermost dimension, by swizzle
  int bytes = type == 6 || type == 9 ? 2 : 0;         // float16 and bfloat16
  int right = bytes && rank >= 1 && rank <= 5 && (uintptr_t)address % 16 == 0 && box[0] * bytes % 16 == 0 &&
              (int)box[0] * bytes <= widest[swizzle];
  for (uint32_t i = 0; i < rank; i++) {
    right = right && sizes[i] >= 1 && sizes[i] <= (uint64_t)1 << 32 && box[i] >= 1 && box[i] <= 256;
    right = right && (i + 1 == rank || (strides[i] % 16 == 0 && strides[i] < (uint64_t)1 << 40));
  }
  printf("copy %s swizzle %d box", right ? "right" : "wrong", swizzle ? 16 << swizzle : 0);
  for (uint32_t i = rank; i--;) printf(" %u", box[i]);
  printf("\n");
  return right ? SUCCESS : INVALID_VALUE;
}

int cuLaunchKernelEx(const uint32_t *config, void *function, void **parameters, void **extra) {
  printf("launch grid %u %u %u block %u\n", config[0], config[1], config[2], config[3]);
  return SUCCESS;
}
