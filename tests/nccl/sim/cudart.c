/*
 * A CUDA runtime without a GPU, for NCCL's host code. Memory of the device is memory of the host,
 * and a kernel does nothing: it ends when it is launched, or not until the test says so.
 *
 * NCCLSIM_CONTROL  a file of one int32, mapped: while it is 1, kernels that are launched do not
 *                  end, nor what is launched behind them on their stream; 0 lets all of them end
 * NCCLSIM_GPUS     how many devices there are (8); device i is NVML's i, at PCI 0000:(10+i):00.0
 */
#define _GNU_SOURCE
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#undef cudaGetDeviceProperties
#undef cudaGetDriverEntryPoint
#undef cudaStreamGetCaptureInfo

#define API __attribute__((visibility("default")))
#define UNUSED __attribute__((unused))
typedef cudaError_t Error;

enum { FIRST_BUS = 0x10, PAGE = 4096, POLL_US = 20000 };

/* ---- streams: a queue of kernels of which the first has started ---- */
struct kernel { struct kernel *next; char arguments[PAGE]; };
struct stream { uint64_t id; int held; struct kernel *first, **last; };
struct event { int held; };

static struct stream legacy = {.id = 1};
static uint64_t last_id = 1;
static void (*on_kernel)(const void *arguments, int done);
static __thread int current;

API void ncclsim_on_kernel(void (*run)(const void *, int)) { on_kernel = run; }

static int holding(void) {
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
    return *page == 1;
}
static struct stream *of(cudaStream_t handle) {
    if (handle == NULL || handle == cudaStreamLegacy || handle == cudaStreamPerThread)
        return &legacy;
    return (struct stream *)handle;
}
/* Tell whether a stream is still held; end its kernels if it no longer is. */
static int held(struct stream *stream) {
    if (!stream->held || holding()) return stream->held;
    struct kernel *kernel = stream->first;
    for (int started = 1; kernel; started = 0) {
        struct kernel *next = kernel->next;
        if (!started) on_kernel(kernel->arguments, 0);
        on_kernel(kernel->arguments, 1);
        free(kernel);
        kernel = next;
    }
    stream->held = 0;
    stream->first = NULL;
    stream->last = NULL;
    return 0;
}
static CUresult launch(struct stream *stream, void **extra) {
    const void *arguments = NULL;
    size_t size = 0;
    for (; extra && *extra != CU_LAUNCH_PARAM_END; extra += 2) {
        if (*extra == CU_LAUNCH_PARAM_BUFFER_POINTER) arguments = extra[1];
        if (*extra == CU_LAUNCH_PARAM_BUFFER_SIZE) size = *(size_t *)extra[1];
    }
    held(stream);
    if (holding()) stream->held = 1;
    if (!on_kernel || !arguments || size > PAGE) return CUDA_SUCCESS;
    if (!stream->held) {
        on_kernel(arguments, 0);
        on_kernel(arguments, 1);
        return CUDA_SUCCESS;
    }
    struct kernel *kernel = calloc(1, sizeof *kernel);
    memcpy(kernel->arguments, arguments, size);
    if (!stream->first) {
        stream->first = kernel;
        on_kernel(kernel->arguments, 0);
    } else {
        *stream->last = kernel;
    }
    stream->last = &kernel->next;
    return CUDA_SUCCESS;
}
API Error cudaStreamCreateWithFlags(cudaStream_t *made, unsigned flags UNUSED) {
    struct stream *stream = calloc(1, sizeof *stream);
    stream->id = __atomic_add_fetch(&last_id, 1, __ATOMIC_RELAXED);
    *made = (cudaStream_t)stream;
    return cudaSuccess;
}
API Error cudaStreamCreateWithPriority(cudaStream_t *made, unsigned flags, int priority UNUSED) {
    return cudaStreamCreateWithFlags(made, flags);
}
API Error cudaStreamCreate(cudaStream_t *made) { return cudaStreamCreateWithFlags(made, 0); }
API Error cudaStreamDestroy(cudaStream_t stream) {
    if (of(stream) != &legacy) free(stream);
    return cudaSuccess;
}
API Error cudaStreamQuery(cudaStream_t stream) {
    return held(of(stream)) ? cudaErrorNotReady : cudaSuccess;
}
API Error cudaStreamSynchronize(cudaStream_t stream) {
    while (held(of(stream))) usleep(POLL_US);
    return cudaSuccess;
}
API Error cudaDeviceSynchronize(void) {
    while (holding()) usleep(POLL_US);
    return cudaSuccess;
}
API Error cudaStreamGetId(cudaStream_t stream, unsigned long long *id) {
    *id = of(stream)->id;
    return cudaSuccess;
}
API Error cudaStreamIsCapturing(cudaStream_t stream UNUSED, enum cudaStreamCaptureStatus *status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
static Error no_capture(
    enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *graph, size_t *number
) {
    *status = cudaStreamCaptureStatusNone;
    if (id) *id = 0;
    if (graph) *graph = NULL;
    if (number) *number = 0;
    return cudaSuccess;
}
#if CUDART_VERSION >= 13000
API Error cudaStreamGetCaptureInfo(
    cudaStream_t stream UNUSED, enum cudaStreamCaptureStatus *status, unsigned long long *id,
    cudaGraph_t *graph, const cudaGraphNode_t **nodes UNUSED,
    const cudaGraphEdgeData **edges UNUSED, size_t *number
) {
    return no_capture(status, id, graph, number);
}
#else
API Error cudaStreamGetCaptureInfo_v2(
    cudaStream_t stream UNUSED, enum cudaStreamCaptureStatus *status, unsigned long long *id,
    cudaGraph_t *graph, const cudaGraphNode_t **nodes UNUSED, size_t *number
) {
    return no_capture(status, id, graph, number);
}
#endif
API Error cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode UNUSED) {
    return cudaSuccess;
}
API Error cudaEventCreateWithFlags(cudaEvent_t *made, unsigned flags UNUSED) {
    *made = calloc(1, sizeof(struct event));
    return cudaSuccess;
}
API Error cudaEventCreate(cudaEvent_t *made) { return cudaEventCreateWithFlags(made, 0); }
API Error cudaEventDestroy(cudaEvent_t event) {
    free(event);
    return cudaSuccess;
}
API Error cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    ((struct event *)event)->held = held(of(stream));
    return cudaSuccess;
}
API Error cudaEventQuery(cudaEvent_t event) {
    return ((struct event *)event)->held && holding() ? cudaErrorNotReady : cudaSuccess;
}
API Error cudaEventSynchronize(cudaEvent_t event) {
    while (cudaEventQuery(event) == cudaErrorNotReady) usleep(POLL_US);
    return cudaSuccess;
}
API Error cudaEventElapsedTime(float *ms, cudaEvent_t from UNUSED, cudaEvent_t to UNUSED) {
    *ms = 1;
    return cudaSuccess;
}
API Error cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags UNUSED) {
    if (cudaEventQuery(event) == cudaErrorNotReady) of(stream)->held = 1;
    return cudaSuccess;
}
API Error cudaLaunchHostFunc(cudaStream_t stream UNUSED, cudaHostFn_t function, void *data) {
    function(data);
    return cudaSuccess;
}

/* ---- devices ---- */
static int gpus(void) {
    const char *number = getenv("NCCLSIM_GPUS");
    return number ? atoi(number) : 8;
}
static int attribute(int which) {
    switch (which) {
    case cudaDevAttrComputeCapabilityMajor: return 9;
    case cudaDevAttrMultiProcessorCount: return 132;
    case cudaDevAttrMaxThreadsPerBlock: return 1024;
    case cudaDevAttrMaxSharedMemoryPerBlock: return 48 << 10;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return 227 << 10;
    case cudaDevAttrWarpSize: return 32;
    case cudaDevAttrUnifiedAddressing: return 1;
    default: return 0;
    }
}
API Error cudaGetDeviceCount(int *number) { *number = gpus(); return cudaSuccess; }
API Error cudaGetDevice(int *device) { *device = current; return cudaSuccess; }
API Error cudaSetDevice(int device) {
    if (device < 0 || device >= gpus()) return cudaErrorInvalidDevice;
    current = device;
    return cudaSuccess;
}
API Error cudaDriverGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
API Error cudaRuntimeGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
API Error cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr which, int device UNUSED) {
    *value = attribute(which);
    return cudaSuccess;
}
API Error cudaGetDeviceProperties(struct cudaDeviceProp *found, int device) {
    *found = (struct cudaDeviceProp){
        .name = "NVIDIA H100 80GB HBM3 (simulated)", .totalGlobalMem = 80ull << 30, .major = 9,
        .multiProcessorCount = 132, .warpSize = 32, .maxThreadsPerBlock = 1024,
        .pciBusID = FIRST_BUS + device, .unifiedAddressing = 1,
    };
    return cudaSuccess;
}
API Error cudaGetDeviceProperties_v2(struct cudaDeviceProp *found, int device) {
    return cudaGetDeviceProperties(found, device);
}
API Error cudaDeviceGetPCIBusId(char *text, int size, int device) {
    snprintf(text, size, "0000:%02x:00.0", FIRST_BUS + device);
    return cudaSuccess;
}
API Error cudaDeviceGetByPCIBusId(int *device, const char *text) {
    unsigned domain, bus;
    if (sscanf(text, "%x:%x", &domain, &bus) != 2) return cudaErrorInvalidDevice;
    if (bus < FIRST_BUS || (int)bus >= FIRST_BUS + gpus()) return cudaErrorInvalidDevice;
    *device = bus - FIRST_BUS;
    return cudaSuccess;
}
API Error cudaDeviceCanAccessPeer(int *can, int device UNUSED, int peer UNUSED) {
    *can = 0;
    return cudaSuccess;
}
API Error cudaDeviceEnablePeerAccess(int peer UNUSED, unsigned flags UNUSED) { return cudaSuccess; }
API Error cudaDeviceSetLimit(enum cudaLimit which UNUSED, size_t value UNUSED) {
    return cudaSuccess;
}
API Error cudaGetLastError(void) { return cudaSuccess; }
API const char *cudaGetErrorString(Error error) { return error ? "simulated error" : "no error"; }

/* ---- memory ---- */
API Error cudaMalloc(void **made, size_t size) {
    *made = aligned_alloc(PAGE, (size + PAGE - 1) / PAGE * PAGE);
    return *made ? cudaSuccess : cudaErrorMemoryAllocation;
}
API Error cudaFree(void *place) { free(place); return cudaSuccess; }
API Error cudaHostAlloc(void **made, size_t size, unsigned flags UNUSED) {
    return cudaMalloc(made, size);
}
API Error cudaFreeHost(void *place) { return cudaFree(place); }
API Error cudaMallocAsync(void **made, size_t size, cudaStream_t stream UNUSED) {
    return cudaMalloc(made, size);
}
API Error cudaFreeAsync(void *place, cudaStream_t stream UNUSED) { return cudaFree(place); }
API Error cudaMallocFromPoolAsync(
    void **made, size_t size, cudaMemPool_t pool UNUSED, cudaStream_t stream UNUSED
) {
    return cudaMalloc(made, size);
}
API Error cudaMemPoolCreate(cudaMemPool_t *pool, const struct cudaMemPoolProps *asked UNUSED) {
    *pool = (cudaMemPool_t)1;
    return cudaSuccess;
}
API Error cudaMemPoolDestroy(cudaMemPool_t pool UNUSED) { return cudaSuccess; }
API Error cudaMemPoolSetAttribute(
    cudaMemPool_t pool UNUSED, enum cudaMemPoolAttr which UNUSED, void *value UNUSED
) {
    return cudaSuccess;
}
API Error cudaHostRegister(void *place UNUSED, size_t size UNUSED, unsigned flags UNUSED) {
    return cudaSuccess;
}
API Error cudaHostUnregister(void *place UNUSED) { return cudaSuccess; }
API Error cudaHostGetDevicePointer(void **device, void *host, unsigned flags UNUSED) {
    *device = host;
    return cudaSuccess;
}
API Error cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind UNUSED) {
    memmove(to, from, size);
    return cudaSuccess;
}
API Error cudaMemcpyAsync(
    void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream UNUSED
) {
    return cudaMemcpy(to, from, size, kind);
}
API Error cudaMemset(void *place, int value, size_t size) {
    memset(place, value, size);
    return cudaSuccess;
}
API Error cudaMemsetAsync(void *place, int value, size_t size, cudaStream_t stream UNUSED) {
    return cudaMemset(place, value, size);
}
API Error cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *place) {
    *found = (struct cudaPointerAttributes){
        .type = cudaMemoryTypeDevice, .device = current,
        .devicePointer = (void *)place, .hostPointer = (void *)place,
    };
    return cudaSuccess;
}

/* ---- kernels ---- */
API Error cudaGetFuncBySymbol(cudaFunction_t *function, const void *symbol) {
    *function = (cudaFunction_t)symbol;
    return cudaSuccess;
}
API Error cudaFuncGetAttributes(struct cudaFuncAttributes *found, const void *function UNUSED) {
    *found = (struct cudaFuncAttributes){
        .maxThreadsPerBlock = 1024, .numRegs = 96, .binaryVersion = 90, .ptxVersion = 90,
    };
    return cudaSuccess;
}
API Error cudaFuncSetAttribute(
    const void *function UNUSED, enum cudaFuncAttribute which UNUSED, int value UNUSED
) {
    return cudaSuccess;
}

/* ---- entry points of the driver, which NCCL asks the runtime for ---- */
static CUresult error_text(CUresult error, const char **text) {
    *text = error ? "simulated error" : "no error";
    return CUDA_SUCCESS;
}
static CUresult device_get(CUdevice *device, int index) { *device = index; return CUDA_SUCCESS; }
static CUresult device_attribute(int *value, CUdevice_attribute which, CUdevice device UNUSED) {
    *value = attribute((int)which);
    return CUDA_SUCCESS;
}
static CUresult device_uuid(CUuuid *uuid, CUdevice device) {
    memset(uuid, 0x5a, sizeof *uuid);
    uuid->bytes[15] = (char)device;
    return CUDA_SUCCESS;
}
static CUresult launch_kernel(
    CUfunction function UNUSED, unsigned grid_x UNUSED, unsigned grid_y UNUSED,
    unsigned grid_z UNUSED, unsigned block_x UNUSED, unsigned block_y UNUSED,
    unsigned block_z UNUSED, unsigned shared UNUSED, CUstream stream, void **values UNUSED,
    void **extra
) {
    return launch(of(stream), extra);
}
static CUresult launch_kernel_ex(
    const CUlaunchConfig *config, CUfunction function UNUSED, void **values UNUSED, void **extra
) {
    return launch(of(config->hStream), extra);
}
static CUresult context_get(CUcontext *context) {
    *context = (CUcontext)(uintptr_t)(0x1000 + current);
    return CUDA_SUCCESS;
}
static CUresult context_create(
    CUcontext *context, CUexecAffinityParam *affinity UNUSED, int number UNUSED,
    unsigned flags UNUSED, CUdevice device UNUSED
) {
    return context_get(context);
}
static CUresult context_take(CUcontext context UNUSED) { return CUDA_SUCCESS; }
static CUresult context_device(CUdevice *device) { *device = current; return CUDA_SUCCESS; }
static CUresult pointer_attribute(void *value, CUpointer_attribute which, CUdeviceptr at UNUSED) {
    *(int *)value = which == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL ? current : 0;
    return CUDA_SUCCESS;
}
static CUresult granularity(
    size_t *size, const CUmemAllocationProp *asked UNUSED,
    CUmemAllocationGranularity_flags which UNUSED
) {
    *size = 2 << 20;
    return CUDA_SUCCESS;
}
static const struct { const char *name; void *function; } driver[] = {
    {"cuGetErrorString", error_text},
    {"cuGetErrorName", error_text},
    {"cuDeviceGet", device_get},
    {"cuDeviceGetAttribute", device_attribute},
    {"cuDeviceGetUuid", device_uuid},
    {"cuLaunchKernel", launch_kernel},
    {"cuLaunchKernelEx", launch_kernel_ex},
    {"cuCtxGetCurrent", context_get},
    {"cuCtxSetCurrent", context_take},
    {"cuCtxDestroy", context_take},
    {"cuCtxCreate", context_create},
    {"cuCtxGetDevice", context_device},
    {"cuPointerGetAttribute", pointer_attribute},
    {"cuMemGetAllocationGranularity", granularity},
};
API Error cudaGetDriverEntryPoint(
    const char *name, void **found, unsigned long long flags UNUSED,
    enum cudaDriverEntryPointQueryResult *result
) {
    *found = NULL;
    for (size_t i = 0; i < sizeof driver / sizeof *driver; i++)
        if (!strcmp(driver[i].name, name)) *found = driver[i].function;
    if (result)
        *result = *found ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return cudaSuccess;
}
API Error cudaGetDriverEntryPointByVersion(
    const char *name, void **found, unsigned version UNUSED, unsigned long long flags,
    enum cudaDriverEntryPointQueryResult *result
) {
    return cudaGetDriverEntryPoint(name, found, flags, result);
}
