/*
 * What PyTorch calls of CUDA's runtime beyond what NCCL does. Built together with ../sim/cudart.c into
 * the one library that stands for all of CUDA's.
 *
 * PyTorch's own kernels do nothing, so that a tensor on a device holds what was copied to it.
 *
 * NCCLSIM_CONTROL, as in ../sim/cudart.c; while it is 2, whoever asks for an event waits, as in a
 * driver that no longer answers
 */
#define _GNU_SOURCE
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#undef cudaGetDriverEntryPointByVersion

#define API __attribute__((visibility("default")))
#define UNUSED __attribute__((unused))
typedef cudaError_t Error;

enum { PAGE = 4096, POLL_US = 20000, SILENT = 2 };

/* ---- kernels of PyTorch: registered, launched, and never run ---- */
static __thread struct { dim3 grid, block; size_t shared; void *stream; } call;
static void *module;

API void **__cudaRegisterFatBinary(void *binary UNUSED) { return &module; }
API void __cudaRegisterFatBinaryEnd(void **handle UNUSED) {}
API void __cudaUnregisterFatBinary(void **handle UNUSED) {}
API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    call.grid = grid;
    call.block = block;
    call.shared = shared;
    call.stream = stream;
    return 0;
}
API Error __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = call.grid;
    *block = call.block;
    *shared = call.shared;
    *(void **)stream = call.stream;
    return cudaSuccess;
}
API Error __cudaGetKernel(cudaKernel_t *kernel, const void *function) {
    *kernel = (cudaKernel_t)function;
    return cudaSuccess;
}

API char __cudaInitModule(void **handle UNUSED) { return 1; }
API Error __cudaLaunchKernel(
    cudaKernel_t kernel UNUSED, dim3 grid UNUSED, dim3 block UNUSED, void **arguments UNUSED,
    size_t shared UNUSED, cudaStream_t stream UNUSED
) {
    return cudaSuccess;
}
API Error cudaLaunchKernel(
    const void *function UNUSED, dim3 grid UNUSED, dim3 block UNUSED, void **arguments UNUSED,
    size_t shared UNUSED, cudaStream_t stream UNUSED
) {
    return cudaSuccess;
}
API Error cudaOccupancyMaxActiveBlocksPerMultiprocessor(
    int *number, const void *function UNUSED, int block UNUSED, size_t shared UNUSED
) {
    *number = 1;
    return cudaSuccess;
}
API Error cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    int *number, const void *function UNUSED, int block UNUSED, size_t shared UNUSED,
    unsigned flags UNUSED
) {
    *number = 1;
    return cudaSuccess;
}

/* ---- events and streams ---- */
extern Error ncclsim_event_query(cudaEvent_t event);

static int silent(void) {
    static volatile int32_t *page;
    static int32_t never;
    if (!page) {
        const char *path = getenv("NCCLSIM_CONTROL");
        int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
        void *mapped = MAP_FAILED;
        if (file >= 0) {
            mapped = mmap(NULL, PAGE, PROT_READ, MAP_SHARED, file, 0);
            close(file);
        }
        page = mapped == MAP_FAILED ? &never : mapped;
    }
    return *page == SILENT;
}
API Error cudaEventQuery(cudaEvent_t event) {
    while (silent()) usleep(POLL_US);
    return ncclsim_event_query(event);
}
API Error cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags UNUSED) {
    return cudaEventRecord(event, stream);
}
API Error cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return cudaSuccess;
}
API Error cudaStreamGetPriority(cudaStream_t stream UNUSED, int *priority) {
    *priority = 0;
    return cudaSuccess;
}

/* ---- devices and the driver ---- */
API Error cudaMemGetInfo(size_t *unused, size_t *total) {
    *unused = 70ull << 30;
    *total = 80ull << 30;
    return cudaSuccess;
}
API const char *cudaGetErrorName(Error error) {
    return error ? "cudaErrorSimulated" : "cudaSuccess";
}
API Error cudaPeekAtLastError(void) { return cudaSuccess; }
API CUresult cuDevicePrimaryCtxGetState(CUdevice device UNUSED, unsigned *flags, int *active) {
    *flags = 0;
    *active = 1;
    return CUDA_SUCCESS;
}

extern Error ncclsim_entry_point(
    const char *name, void **found, unsigned version, unsigned long long flags,
    enum cudaDriverEntryPointQueryResult *result
);

/* PyTorch insists that each call of the driver that it may ever make is there. */
API Error cudaGetDriverEntryPointByVersion(
    const char *name, void **found, unsigned version, unsigned long long flags,
    enum cudaDriverEntryPointQueryResult *result
) {
    ncclsim_entry_point(name, found, version, flags, result);
    if (!*found) *found = dlsym(RTLD_DEFAULT, name);
    if (*found && result) *result = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
