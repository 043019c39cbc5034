/* The C ABI that caltrio drives a CalRT library through. Plain C; no exception leaves it.
 *
 * One thread of the caller's may use a device at a time, unless a function says otherwise. Calls
 * return CalRT codes (0 is success) where not said otherwise. None but caltrio_configure(),
 * caltrio_reset() and the two direct calls waits for the card.
 */
#ifndef CALTRIO_H
#define CALTRIO_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* What follows up to the end mark is read by Python's cffi as it stands. */
/* begin */

typedef struct caltrio_device caltrio_device;
typedef struct caltrio_buffers caltrio_buffers;

typedef struct {
  const char *name;
  int32_t dtype; /* 0 s32, 1 bf16, 2 f32 */
  int32_t rank;
  uint64_t shape[8];
  uint64_t byte_size;
} caltrio_tensor;

/* infer() has returned, or the job was withdrawn before it was called. */
typedef struct {
  uint64_t token;
  int32_t rc;
  int32_t withdrawn;
} caltrio_submission;

/* Wait() has returned. Times are CLOCK_MONOTONIC ns; of stages -1 where the device reports none.
 * All of 64 bits, so that it can be read as one row of numbers. */
typedef struct {
  uint64_t token;
  int64_t rc;
  int64_t exception; /* the status is DONE_CCU_EXCEPTION */
  uint64_t output_bytes;
  int64_t infer_ns, submitted_ns, waited_ns;
  int64_t engine, dies;
  int64_t h2d_start_ns, h2d_end_ns, d2h_start_ns, d2h_end_ns;
  int64_t die_start_ns[8], die_end_ns[8];
} caltrio_completion;

int32_t caltrio_abi(void);

/* A device and the model file that it is to hold; NULL, and the code, if that cannot be read. */
caltrio_device *caltrio_open(const char *calbin, int32_t *code);
/* Take no more work, and let both threads end once the card has returned what it has. */
void caltrio_stop(caltrio_device *device);
/* Have they ended, and whatever was begun? Only then may the device be freed. */
int32_t caltrio_stopped(caltrio_device *device);
void caltrio_free(caltrio_device *device);

int32_t caltrio_model_count(caltrio_device *device);
const char *caltrio_model_name(caltrio_device *device, int32_t model);
int32_t caltrio_model_tensors(caltrio_device *device, int32_t model);
int32_t caltrio_model_tensor(caltrio_device *device, int32_t model, int32_t index,
                             caltrio_tensor *out);
int32_t caltrio_model_metadata(caltrio_device *device, int32_t model, int32_t index,
                               const char **key, const char **value);

/* Both may take long. */
int32_t caltrio_configure(caltrio_device *device, int32_t parallel);
/* Code 25 if the threads have not got back every job within `timeout_ns` after it. The ring takes
 * jobs again only after a caltrio_configure() that succeeded. */
int32_t caltrio_reset(caltrio_device *device, int64_t timeout_ns);
/* The same in a thread of the library's; 17 if the one before has not ended. */
int32_t caltrio_begin_configure(caltrio_device *device, int32_t parallel);
int32_t caltrio_begin_reset(caltrio_device *device, int64_t timeout_ns);
/* 1, and its code, once the one that was begun has ended. */
int32_t caltrio_ended(caltrio_device *device, int32_t *code);

int32_t caltrio_kv_can_allocate(caltrio_device *device, uint32_t sequences); /* 1: yes */
int32_t caltrio_kv_apply(caltrio_device *device, int32_t sequence, uint32_t tokens); /* 1: done */
void caltrio_kv_release(caltrio_device *device, int32_t sequence);
int32_t caltrio_set_csr(caltrio_device *device, const char *model, const char *name,
                        uint32_t value);

caltrio_buffers *caltrio_buffers_new(caltrio_device *device, const char *model);
/* The card must not have a job with them. */
void caltrio_buffers_free(caltrio_buffers *buffers);
int32_t caltrio_buffers_tensor(caltrio_buffers *buffers, const char *name, caltrio_tensor *out);
int32_t caltrio_map_input(caltrio_buffers *buffers, const char *tensor, void *host, uint64_t bytes);
int32_t caltrio_map_output(caltrio_buffers *buffers, const char *tensor, void *host,
                           uint64_t bytes);
int32_t caltrio_slice(caltrio_buffers *buffers, const char *tensor, uint64_t offset,
                      uint64_t bytes);
int32_t caltrio_undo_slices(caltrio_buffers *buffers);

/* infer() and Wait() in the caller's own thread, without the ring: for measuring what that costs.
 * Not while the ring has jobs. */
int32_t caltrio_direct_infer(caltrio_device *device, caltrio_buffers *buffers, int32_t engine,
                             int32_t kv_sequence);
int32_t caltrio_direct_wait(caltrio_buffers *buffers);

/* The ring. `engine` -1 lets the runtime choose. A job goes to the card as soon as fewer than the
 * limit are in flight; until then it can be withdrawn. 0: a report of its submission will come;
 * 17: the ring holds a job back already; 18: it was stopped. */
int32_t caltrio_submit(caltrio_device *device, caltrio_buffers *buffers, uint64_t token,
                       int32_t engine, int32_t kv_sequence);
void caltrio_withdraw(caltrio_device *device, uint64_t token);
void caltrio_limit(caltrio_device *device, int32_t max_inflight);
/* After a failure the ring submits nothing until this is called: all that was fetched has been judged. */
void caltrio_resume(caltrio_device *device);
/* An eventfd that is readable while there are reports. */
int32_t caltrio_event_fd(caltrio_device *device);
/* Fetches reports, submissions before the completions that they cause; returns how many of both. */
int32_t caltrio_drain(caltrio_device *device, caltrio_submission *submissions, int32_t *submitted,
                      caltrio_completion *completions, int32_t *completed, int32_t most);

/* end */

#ifdef __cplusplus
}
#endif

#endif
