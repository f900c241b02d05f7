/* libcuda.so.1: NCCL only has to find it; what it calls it gets from the runtime. */
int cuInit(unsigned flags) { (void)flags; return 0; }
