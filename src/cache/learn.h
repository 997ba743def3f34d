/* learn.h - transform=first: matrices W (key_transform.h) that a cache learns from the keys and
 * queries of its first rows. learning.md has the arithmetic. These functions serve the choice of
 * transforms (transforms.h): a transform with W is selected, replaced and remembered by blocks like
 * every other transform. */
#pragma once

#include "transforms.h"
#include "key_transform.h"

/* Creates the learning state. KVANT_OK without any memory for a tensor that learns no matrices.
 * KVANT_ERR_MEMORY. */
kvant_status kvant_learning_create(kvant_tensor *tensor);
void kvant_learning_destroy(kvant_tensor *tensor);

/* Allocates memory for pending rows and queries, which wait until a transform is selected for them.
 * KVANT_ERR_MEMORY. */
kvant_status kvant_learning_reserve(const kvant_tensor *tensor);

/* Bytes that learning takes now, without the matrices that it made; and the most that it keeps
 * between two calls. */
size_t kvant_learning_bytes(const kvant_tensor *tensor);
size_t kvant_learning_most(const kvant_tensor *tensor);

/* Frees memory that holds no pending rows or queries and from which no matrix will be made. Call it
 * only when the write can no longer fail: a write that fails restores the former state. */
void kvant_learning_free_unused(const kvant_tensor *tensor);

/* Forgets everything except the transforms. */
void kvant_learning_reset(kvant_tensor *tensor);

/* Whether the rows of a write on a device should be copied to the host, so that learning sees
 * them. */
bool kvant_learning_wants_rows(const kvant_tensor *tensor, const kvant_new_rows *rows);

/* Adds rows to the sample by which transforms are judged. The rows are a long batch or a part of
 * several short ones; they are none when they lie on a device only. With `first` the new rows
 * replace the former sample. kvant_learning_undo_sample removes the rows that were added last. */
void kvant_learning_sample_rows(kvant_tensor *tensor, const kvant_new_rows *rows, bool first);
void kvant_learning_undo_sample(kvant_tensor *tensor);

/* Whether RoPE of the keys is known (kvant_tensor_set_rope). */
bool kvant_learning_knows_rope(const kvant_tensor *tensor);

/* Whether to try a transform for the position bucket that the rows have reached, made from the
 * existing second moments. It returns true when two conditions hold. No transform was tried for the
 * bucket yet. The rows do not fit the choice, or the choice comes from different second moments.
 * fits: the rows fit the choice. n_unused: transforms that may still be made. */
bool kvant_learning_needs_bucket(const kvant_tensor *tensor, const kvant_choice *choice, bool fits,
                                 uint32_t n_unused);

/* Makes a candidate transform for the bucket. *bucket_added becomes true when the candidate is
 * better for the sample than the choice. That is so if its error is lower than the choice's, whose
 * relative error is `least`, and its own relative error is at most `most`. KVANT_ERR_MEMORY. */
kvant_status kvant_learning_add_bucket(kvant_tensor *tensor, const kvant_choice *choice,
                                       double least, double most, uint32_t n_unused,
                                       uint32_t n_threads, bool *bucket_added);

/* Prepares the sample for a judgement: rotates the sampled rows and queries to positions that are
 * spread over their position bucket. So their content decides, and not the positions at which they
 * happen to be. */
void kvant_learning_spread(kvant_tensor *tensor, uint32_t n_threads);

/* Ends a write of n rows. n = 0: the write failed. */
void kvant_learning_written(kvant_tensor *tensor, const int64_t *slots, size_t n);

/* Computes relative errors like find_relative_errors of transforms.c, but from the sampled rows and
 * queries. Returns false when there are too few of them. */
bool kvant_learning_relative_errors(kvant_tensor *tensor, uint32_t n_threads,
                                    double relative_errors[KVANT_MAX_TRANSFORMS]);

/* Whether the sample repeats a few tokens again and again. Each batch of such rows would get a new
 * transform, so the last unused transform is kept for other rows. */
bool kvant_learning_is_monotonous(const kvant_tensor *tensor);

/* Adds the rows to the second moments. When a matrix is due, the candidate gets one, and if it is
 * better it becomes the choice. all: the rows of the batch; NULL: the sampled rows.
 * KVANT_ERR_MEMORY. */
kvant_status kvant_learning_add(kvant_tensor *tensor, kvant_choice *choice,
                                const kvant_new_rows *all, uint32_t n_unused, uint32_t n_threads);

/* Makes the second moments belong to this transform from now on. */
void kvant_learning_publish(kvant_tensor *tensor, uint32_t transform_id);
