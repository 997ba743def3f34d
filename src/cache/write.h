/* write.h - a write of rows to a tensor, as write.c and place.c see it. write.c checks the rows and
 * learns from them, place.c encodes them. */
#pragma once

#include <stdatomic.h>

#include "learning.h"

typedef struct kvant_write_job {
    kvant_tensor *tensor;
    const kvant_kernels *kernels;
    const int64_t *slots;
    const float *rows; /* where the tensor's pages are */
    const float *seen; /* on the host, or NULL: known to fit */
    size_t n, stride;
    uint32_t n_threads;
    const uint8_t *shifts; /* numbers that the rows' slots get (shift.h), or NULL */
    kvant_choice choice;
    bool undoable; /* learn: another tensor's failure takes it back */
    /* What follows when nothing fails: noted rows are done with, sums begin again. */
    bool forgets, resets;
    kvant_kept *kept;                /* the learning before this write, or NULL */
    kvant_run runs[KVANT_MOST_RUNS]; /* of the rows before `done`, the last n_placed */
    uint32_t n_runs, classes;
    size_t done, n_placed;
    atomic_int status;
} kvant_write_job;

/* A run is a stretch of neighbouring rows that go to one block: the one that begins with row
 * `first`. */
kvant_run kvant_write_run(const kvant_write_job *job, size_t first);

/* The transform that the run's block gets, and the first position of the block. A block that rows
 * of its other slots stay in keeps its own. */
uint32_t kvant_write_version(const kvant_write_job *job, const kvant_run *r);
int32_t kvant_write_position(const kvant_write_job *job, const kvant_run *r);

/* Whether rows for a block go through an open page. */
bool kvant_write_opens(const kvant_tensor *tensor, uint32_t block, uint32_t version);

/* Places some of the rows that are left: at most one run for each block, and no more runs than can
 * have open pages at once. Other blocks may be sealed for them. */
void kvant_write_place(kvant_write_job *job);

/* Encodes what was placed last, of one job or of two. */
void kvant_write_encode(kvant_write_job *jobs, size_t n_jobs);

/* Notes the transform that the next block of each sequence begins with, once all rows are
 * placed. */
void kvant_write_note_versions(const kvant_write_job *job);
