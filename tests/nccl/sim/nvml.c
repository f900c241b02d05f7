/* The calls of NVML that NCCL makes. GPU i is at 0000:(10+i):00.0 and has no NVLink. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#define API __attribute__((visibility("default")))
enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6 };
enum { FIRST_BUS = 0x10 };
typedef void *Device; /* the index and 1, as NULL is no device */

static int gpus(void) {
    const char *number = getenv("NCCLSIM_GPUS");
    return number ? atoi(number) : 8;
}
static unsigned index_of(Device device) { return (unsigned)(uintptr_t)device - 1; }

API int nvmlInit_v2(void) { return SUCCESS; }
API int nvmlInit(void) { return SUCCESS; }
API int nvmlShutdown(void) { return SUCCESS; }
API const char *nvmlErrorString(int result) { return result ? "simulated error" : "Success"; }
API int nvmlDeviceGetCount_v2(unsigned *number) { *number = gpus(); return SUCCESS; }
API int nvmlDeviceGetCount(unsigned *number) { return nvmlDeviceGetCount_v2(number); }
API int nvmlDeviceGetHandleByIndex(unsigned index, Device *device) {
    if ((int)index >= gpus()) return INVALID_ARGUMENT;
    *device = (Device)(uintptr_t)(index + 1);
    return SUCCESS;
}
API int nvmlDeviceGetHandleByPciBusId(const char *text, Device *device) {
    unsigned domain, bus;
    if (sscanf(text, "%x:%x", &domain, &bus) != 2 || bus < FIRST_BUS) return NOT_FOUND;
    return nvmlDeviceGetHandleByIndex(bus - FIRST_BUS, device) ? NOT_FOUND : SUCCESS;
}
API int nvmlDeviceGetIndex(Device device, unsigned *index) {
    *index = index_of(device);
    return SUCCESS;
}
API int nvmlDeviceGetCudaComputeCapability(Device device, int *major, int *minor) {
    (void)device;
    *major = 9;
    *minor = 0;
    return SUCCESS;
}
API int nvmlDeviceGetP2PStatus(Device one, Device other, int what, int *status) {
    (void)one; (void)other; (void)what;
    *status = 2; /* NVML_P2P_STATUS_GPU_NOT_SUPPORTED, so that memory of the host is used */
    return SUCCESS;
}
API int nvmlDeviceGetNvLinkState(Device device, unsigned link, int *active) {
    (void)device; (void)link; (void)active;
    return NOT_SUPPORTED;
}
API int nvmlDeviceGetNvLinkCapability(Device device, unsigned link, int what, unsigned *has) {
    (void)device; (void)link; (void)what; (void)has;
    return NOT_SUPPORTED;
}
API int nvmlDeviceGetNvLinkRemotePciInfo(Device device, unsigned link, void *pci) {
    (void)device; (void)link; (void)pci;
    return NOT_SUPPORTED;
}
API int nvmlDeviceGetFieldValues(Device device, int number, void *values) {
    (void)device; (void)number; (void)values;
    return NOT_SUPPORTED;
}
struct pci { char legacy[16]; unsigned domain, bus, device, id, subsystem; char text[32]; };
/* NCCL 2.30.7 calls the last three without looking whether they are there. */
API int nvmlDeviceGetPciInfo_v3(Device device, struct pci *pci) {
    *pci = (struct pci){.bus = FIRST_BUS + index_of(device), .id = 0x233010de};
    snprintf(pci->legacy, sizeof pci->legacy, "0000:%02X:00.0", pci->bus & 0xff);
    snprintf(pci->text, sizeof pci->text, "00000000:%02X:00.0", pci->bus & 0xff);
    return SUCCESS;
}
API int nvmlDeviceGetCurrPcieLinkGeneration(Device device, unsigned *generation) {
    (void)device;
    *generation = 5;
    return SUCCESS;
}
API int nvmlDeviceGetCurrPcieLinkWidth(Device device, unsigned *width) {
    (void)device;
    *width = 16;
    return SUCCESS;
}
