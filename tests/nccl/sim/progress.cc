// What a kernel does that NCCL's host code waits for though no data moves: it counts the work of
// each channel for the profiler. Compiled with the headers of the NCCL it goes into, so that every
// layout is NCCL's own.
#include <ctime>

#include "device.h"

namespace {

uint64_t now() {
  timespec time;
  clock_gettime(CLOCK_REALTIME, &time);
  return uint64_t(time.tv_sec) * 1000000000 + time.tv_nsec;
}

void mark(ncclDevProfiler* place, uint64_t counter) {
  auto& slot = place->data[counter % MAX_PROFILER_EVENTS_PER_CHANNEL];
  slot.timestamp = now();
  __atomic_store_n(&slot.counter, counter, __ATOMIC_RELEASE);
}

// A kernel starts (`done` 0) or ends (1); the simulated runtime calls it for each.
void run(const void* arguments, int done) {
  auto* args = static_cast<const ncclDevKernelArgs*>(arguments);
  auto* all = reinterpret_cast<ncclKernelCommAndChannels*>(args->comm);
  auto* batches = reinterpret_cast<const ncclDevWorkBatch*>(args + 1);
  int block = 0;
  for (int channel = 0; channel < MAXCHANNELS; channel++) {
    if (!(args->channelMask & (1ull << channel))) continue;
    uint64_t counter = all->channels[channel].workCounter;
    for (int index = block++;; index += batches[index].nextJump) {
      for (int works = __builtin_popcountll(batches[index].offsetBitset); works > 0; works--)
        mark(done ? &args->comm->workCompleted[channel] : &args->comm->workStarted[channel],
             ++counter);
      if (batches[index].nextJump == 0) break;
    }
    if (done) all->channels[channel].workCounter = counter;
  }
}

extern "C" void ncclsim_on_kernel(void (*)(const void*, int));
__attribute__((constructor)) void offer() { ncclsim_on_kernel(run); }

}  // namespace
