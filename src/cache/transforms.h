/* transforms.h - chooses the transform (centre and scale, or W) of each row. learning.md has the
 * rules. Row statistics are in statistics.h; matrices are in learn.h. */
#pragma once

#include "tensor.h"

#include "../store/learn.h"

/* The result of judging a batch. */
typedef struct kvant_choice {
    bool selected; /* false: blocks keep their transform, and new blocks use their sequence's */
    /* The transform for the rows, if they were judged. KVANT_CANDIDATE: a new transform, until
     * kvant_choice_publish gives it an id. */
    uint8_t transform_id;
    bool
        rejected[KVANT_MAX_TRANSFORMS]; /* rejected: rows with this transform would err much more */
    kvant_status status;                /* KVANT_ERR_MEMORY: there is no choice */
} kvant_choice;

/* n >= 1 finite rows of a write, row i at rows + i * stride for slots[i]. */
typedef struct kvant_new_rows {
    const float *rows;
    size_t stride, n;
    const int64_t *slots;
} kvant_new_rows;

/* Judges the rows of a batch, or all rows of short writes since kvant_transforms_forget. Both
 * functions change the candidate and the second moments of transform=first. A write that fails must
 * undo that (kvant_learning_reset). */
kvant_choice kvant_transforms_select(kvant_tensor *tensor, const kvant_new_rows *rows,
                                     uint32_t n_threads);
kvant_choice kvant_transforms_select_pending(kvant_tensor *tensor, uint32_t n_threads);

/* Allocates memory for row statistics, until kvant_transforms_forget. KVANT_ERR_MEMORY. */
kvant_status kvant_transforms_reserve(kvant_tensor *tensor);

/* How many transforms a tensor can have, including transform 0. */
uint32_t kvant_transforms_at_most(const kvant_tensor *tensor);

/* Bytes that learning takes now, without the transforms; and the most that it keeps between two
 * calls. */
size_t kvant_transforms_bytes(const kvant_tensor *tensor);
size_t kvant_transforms_most(const kvant_tensor *tensor);

/* Accumulates the rows of a short write; forgets all accumulated rows. selected: the rows will be
 * judged next, which may fail. */
void kvant_transforms_note(kvant_tensor *tensor, const kvant_new_rows *rows, bool selected);
void kvant_transforms_forget(kvant_tensor *tensor);

/* After a judgement that failed for lack of memory: removes the rows that were accumulated last. */
void kvant_transforms_undo_note(kvant_tensor *tensor);

/* Whether the rows that were judged last can be stored with a transform (KVANT_CANDIDATE included).
 * It compares only their largest magnitudes, so false means that the rows themselves must be
 * checked. */
bool kvant_transforms_fit(const kvant_tensor *tensor, uint32_t transform_id);

/* Puts the choice into force. Rows that were pending for the first transform are expressed in
 * it. */
void kvant_choice_publish(kvant_tensor *tensor, kvant_choice *choice);
