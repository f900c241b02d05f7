/* The names that NCCL and CUDA's runtime export, as far as `tests/nccl/rank.py` calls them, with
 * nothing behind: built in a second, for tests of who launches how often. */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct { char bytes[128]; } Id;

#define COLLECTIVE(name, ...)                                                                      \
    int name(__VA_ARGS__) { return ENTRY; }
#ifndef ENTRY
#define ENTRY 0
#endif

int ncclGetUniqueId(Id *id) {
    memset(id, 0, sizeof *id);
    int failed = getentropy(id->bytes, 40);
    return failed ? 2 : 0;
}
#ifdef MOVES
/* Begins with a mov, as NVIDIA's ncclCommInitRankConfig does. */
__attribute__((naked)) int ncclCommInitRank(void **made, int size, Id id, int rank) {
    __asm__("mov %rdi, %rax\n jmp initialize");
}
int initialize(void **made, int size, Id id, int rank) {
#else
int ncclCommInitRank(void **made, int size, Id id, int rank) {
#endif
    *made = calloc(1, 1024 + (size_t)(size + rank + id.bytes[0] * 0));
    return 0;
}
int ncclCommInitRankConfig(void **made, int size, Id id, int rank, void *config) {
    (void)config;
    return ncclCommInitRank(made, size, id, rank);
}
int ncclCommInitRankScalable(void **made, int size, int rank, int many, Id *ids, void *config) {
    (void)many;
    return ncclCommInitRankConfig(made, size, *ids, rank, config);
}
int ncclCommSplit(void *old, int color, int key, void **made, void *config) {
    (void)old, (void)key, (void)config;
    *made = color < 0 ? NULL : calloc(1, 1024);
    return 0;
}
int ncclCommDestroy(void *comm) {
    free(comm);
    return 0;
}
int ncclCommAbort(void *comm) { return ncclCommDestroy(comm); }
const char *ncclGetErrorString(int error) { return error ? "error" : "ok"; }
const char *ncclGetLastError(void *comm) {
    (void)comm;
    return "";
}
COLLECTIVE(ncclAllReduce, void *a, void *b, size_t n, int t, int op, void *comm, void *stream)
COLLECTIVE(ncclBroadcast, void *a, void *b, size_t n, int t, int root, void *comm, void *stream)
COLLECTIVE(ncclReduce, void *a, void *b, size_t n, int t, int op, int root, void *comm, void *s)
COLLECTIVE(ncclAllGather, void *a, void *b, size_t n, int t, void *comm, void *stream)
COLLECTIVE(ncclReduceScatter, void *a, void *b, size_t n, int t, int op, void *comm, void *s)
COLLECTIVE(ncclSend, void *a, size_t n, int t, int peer, void *comm, void *stream)
COLLECTIVE(ncclRecv, void *a, size_t n, int t, int peer, void *comm, void *stream)

int cudaSetDevice(int device) { return device < 0; }
int cudaStreamCreateWithFlags(void **stream, unsigned flags) {
    *stream = NULL;
    return flags > 1;
}
int cudaMalloc(void **place, size_t size) {
    *place = malloc(size);
    return 0;
}
int cudaStreamSynchronize(void *stream) { return stream != NULL; }
