/* learn.h - transform=first: matrices (weights.h) from the keys and the queries of the first rows
 * (learning.md has the arithmetic). Belongs to the choice of versions (versions.h): a version
 * with matrices is judged, replaced and remembered by blocks as every version is. */
#pragma once

#include "versions.h"
#include "weights.h"

/* KVANT_OK, without memory, for a tensor that learns no matrices. */
kvant_status kvant_learning_create(kvant_tensor *tensor);
void kvant_learning_destroy(kvant_tensor *tensor);

/* There is room for rows and queries that wait for a judgement.
 * KVANT_ERR_MEMORY. */
kvant_status kvant_learning_open(const kvant_tensor *tensor);

/* Bytes that learning takes now, beside the matrices that it made; and the most that it keeps
 * between two calls. */
size_t kvant_learning_bytes(const kvant_tensor *tensor);
size_t kvant_learning_most(const kvant_tensor *tensor);

/* Gives back memory that nothing waits in and no matrix is made from. Not while a write can fail
 * any more: until then what was learned may be taken back. */
void kvant_learning_rest(const kvant_tensor *tensor);

/* Forgets everything but the versions. */
void kvant_learning_reset(kvant_tensor *tensor);

/* Whether rows of a device are worth a look. */
bool kvant_learning_looks(const kvant_tensor *tensor, const kvant_new_rows *rows);

/* Rows, where the host has them, of a batch that is judged by itself, or of one that is judged together with others: the
 * first of a batch replace what was sampled before. */
void kvant_learning_sample(kvant_tensor *tensor, const kvant_new_rows *rows, bool first);
void kvant_learning_unsample(kvant_tensor *tensor);

/* Whether keys turn with their positions, as far as is known. */
bool kvant_learning_follows(const kvant_tensor *tensor);

/* RoPE goes on turning keys. Whether the sums make a version for positions that rows have come to, and none has been tried for yet;
 * */
bool kvant_learning_turns(const kvant_tensor *tensor, const kvant_choice *choice, bool fits,
                          uint32_t n_unused);

/* The candidate becomes that version, and *turned true, where it is better for the sample than the choice, whose excess is `least`,
 * and exceeds the best factors less than `most` times. KVANT_ERR_MEMORY. */
kvant_status kvant_learning_turn(kvant_tensor *tensor, const kvant_choice *choice, double least,
                                 double most, uint32_t n_unused, uint32_t n_threads, bool *turned);

/* Before a judgement: sampled rows and queries turn to positions all over the octave (turn.h) that the rows are in. So they are judged
 * by what they are, not by where they happen to be. */
void kvant_learning_spread(kvant_tensor *tensor, uint32_t n_threads);

/* After a write of n rows, or one that failed: n = 0. */
void kvant_learning_written(kvant_tensor *tensor, const int64_t *slots, size_t n);

/* As find_excess of versions.c, by sampled rows and queries. False when there are too few of
 * them. */
bool kvant_learning_excess(kvant_tensor *tensor, uint32_t n_threads,
                           double excess[KVANT_MAX_VERSIONS]);

/* Whether the sample is of few tokens again and again. Each batch of such rows would take a version of its own; the last one is for
 * others. */
bool kvant_learning_is_monotonous(const kvant_tensor *tensor);

/* The rows become part of what is learnt from. Where that is due, the candidate gets matrices, and
 * the choice if they are better. all: the batch's rows; NULL: those sampled. KVANT_ERR_MEMORY. */
kvant_status kvant_learning_add(kvant_tensor *tensor, kvant_choice *choice,
                                const kvant_new_rows *all, uint32_t n_unused, uint32_t n_threads);

/* What is learnt belongs to the version from now on. */
void kvant_learning_publish(kvant_tensor *tensor, uint32_t version);
