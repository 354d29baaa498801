/* Two threads in one context, each with a stream of its own; each waits for an event that the other
   recorded, so the order between the streams matters. */
#include <pthread.h>

#include "common.h"

enum { kCount = 4096, kRounds = 20 };

static Session session;
static CUdeviceptr shared_buffer;
static CUstream streams[2];
static CUevent turns[2];
static pthread_barrier_t barrier;

static void* work(void* argument) {
  int me = *(int*)argument;
  CUfunction fill;
  static unsigned host[2][kCount];
  unsigned n = kCount;
  CHECK(cuCtxSetCurrent(session.context));
  fill = kernel_of(&session, "fill");
  for (int round = 0; round < kRounds; ++round) {
    /* The thread whose turn it is fills; the other one reads behind the event. */
    int filler = round % 2;
    unsigned value = 1000u * (unsigned)round;
    if (me == filler) {
      void* parameters[] = {&shared_buffer, &value, &n};
      CHECK(cuLaunchKernel(fill, kCount / 256, 1, 1, 256, 1, 1, 0, streams[me], parameters, NULL));
      CHECK(cuEventRecord(turns[me], streams[me]));
    }
    pthread_barrier_wait(&barrier);
    if (me != filler) {
      CHECK(cuStreamWaitEvent(streams[me], turns[filler], 0));
      CHECK(cuMemcpyDtoHAsync(host[me], shared_buffer, sizeof host[me], streams[me]));
      CHECK(cuStreamSynchronize(streams[me]));
      for (unsigned i = 0; i < kCount; ++i) EXPECT(host[me][i] == value + i);
    }
    pthread_barrier_wait(&barrier);
  }
  return NULL;
}

int main(void) {
  session = open_session();
  CHECK(cuMemAlloc(&shared_buffer, kCount * sizeof(unsigned)));
  for (int i = 0; i < 2; ++i) {
    CHECK(cuStreamCreate(&streams[i], CU_STREAM_NON_BLOCKING));
    CHECK(cuEventCreate(&turns[i], CU_EVENT_DISABLE_TIMING));
  }
  pthread_barrier_init(&barrier, NULL, 2);
  pthread_t threads[2];
  int numbers[2] = {0, 1};
  for (int i = 0; i < 2; ++i) pthread_create(&threads[i], NULL, work, &numbers[i]);
  for (int i = 0; i < 2; ++i) pthread_join(threads[i], NULL);
  for (int i = 0; i < 2; ++i) {
    CHECK(cuEventDestroy(turns[i]));
    CHECK(cuStreamDestroy(streams[i]));
  }
  CHECK(cuMemFree(shared_buffer));
  close_session(&session);
  return verdict_ok();
}
