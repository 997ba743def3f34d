/* write.h - writing rows to a tensor: write.c checks the rows and learns from them, write_encode.c
 * encodes them. */
#pragma once

#include <stdatomic.h>

#include "learning.h"
#include "shift.h"

typedef struct kvant_write_job {
    kvant_tensor *tensor;
    const kvant_kernels *kernels;
    const int64_t *slots;
    const float *rows; /* in the memory that holds the tensor's pages */
    const float *seen; /* the same rows on the host; NULL: they are known to fit */
    size_t n, stride;
    uint32_t n_threads;
    const uint8_t *shifts; /* shift ids that the rows' slots get (shift.h), or NULL */
    kvant_choice choice;
    bool undoable; /* keep a copy of the learning, because the second tensor may fail */
    /* When nothing fails: forget accumulated rows; begin the second moments again. */
    bool forgets, resets;
    kvant_saved_learning *kept; /* the learning before this write, or NULL */
    kvant_run *runs;            /* KVANT_MOST_RUNS: of the rows before `done`, the last n_placed */
    uint32_t n_runs, classes;
    size_t done, n_placed;
    atomic_int status;
} kvant_write_job;

/* The run that begins with row `first`: neighbouring rows that go to one block. */
kvant_run kvant_write_run(const kvant_write_job *job, size_t first);

/* The transform that the run's block gets, and the first position of the block. A block keeps its
 * own when rows stay in its other slots. */
uint32_t kvant_write_transform(const kvant_write_job *job, const kvant_run *r);
int32_t kvant_write_position(const kvant_write_job *job, const kvant_run *r);

/* Whether the rows of a block pass through an open page. */
bool kvant_write_opens(const kvant_tensor *tensor, uint32_t block, uint32_t transform_id);

/* Places some of the remaining rows: at most one run per block, and at most as many runs as can
 * have open pages at the same time. Seals other blocks to free pages. */
void kvant_write_place(kvant_write_job *job);

/* Encodes the rows that were placed last, of one job or of two. */
void kvant_write_encode(kvant_write_job *jobs, size_t n_jobs);

/* The bodies of that loop, for a caller that has more work for the same threads. There is a body
 * for each kv head of the rows that were placed last, and of the rows that are due for sealing.
 * Bodies may run at once, in any order. kvant_write_encode_new returns its kv head. After the last
 * body the caller calls kvant_write_encoded. */
size_t kvant_write_new_bodies(const kvant_write_job *jobs, size_t n_jobs);
size_t kvant_write_due_bodies(const kvant_write_job *jobs, size_t n_jobs);
uint32_t kvant_write_encode_new(const kvant_write_job *jobs, size_t body);
void kvant_write_encode_due(const kvant_write_job *jobs, size_t body);
void kvant_write_encoded(kvant_write_job *jobs, size_t n_jobs);

/* Records the transform with which the next block of each sequence begins. Call it when all rows
 * are placed. */
void kvant_write_note_transforms(const kvant_write_job *job);

/* A write of one tensor or two. */
typedef struct kvant_write {
    kvant_write_job jobs[2];
    kvant_run runs[2][KVANT_MOST_RUNS];
    kvant_unshifted unshifted[2];
    size_t n_jobs;
} kvant_write;

/* Begins a write: checks its rows and learns from them. Call kvant_write_end with the status, also
 * after an error, by which neither tensor changes. In between all rows have to be placed and
 * encoded; both cannot fail. kvant_write_end returns its argument or a device's error. */
kvant_status kvant_write_begin(kvant_write *write, const kvant_rows *rows, size_t n_tensors,
                               const int64_t *slots, size_t n, uint32_t n_threads);
kvant_status kvant_write_end(kvant_write *write, kvant_status status);

/* The first part of kvant_write_end. It may run while rows are being encoded and read. */
kvant_status kvant_write_close(kvant_write *write, kvant_status status);
/* The second part: frees the rows that kvant_write_begin copied. */
void kvant_write_release(kvant_write *write);
