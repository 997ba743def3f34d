/* rope.h - RoPE (kvant_rope), as transform=first uses it. The cache learns second moments of keys
 * and queries that were rotated back to position 0. For a range of positions it takes the mean of
 * the moments over these positions. */
#pragma once

#include "tensor.h"

#include "../store/learn.h"

/* Two channels of a sub-head (key_transform.h) that RoPE rotates together. Channels that RoPE does
 * not rotate form pairs of frequency 0. */
typedef struct kvant_pair {
    uint16_t first, second;
    float frequency;
} kvant_pair;

typedef struct kvant_rope_state {
    /* As in kvant_rope. n_positions is never 0 here. */
    uint32_t n_dims, interleaved, n_positions, n_position_transforms, block_centers;
    uint32_t part, n_buckets;
    float frequencies[KVANT_MAX_HEAD_DIM / 2];
    kvant_pair pairs[KVANT_MAX_HEAD_DIM / 2]; /* of sub-head 0, then of sub-head 1 and so on */
} kvant_rope_state;

/* Sine and cosine of any angle, with the same bits on every machine. */
void kvant_rope_sin_cos(double angle, double *sine, double *cosine);

/* Finds the pairs of a part of n channels. Returns false when a pair is in two parts, or a channel
 * has no partner. */
bool kvant_rope_part_pairs(const kvant_rope *rope, uint32_t head_dim, uint32_t n, uint32_t part,
                           kvant_pair *pairs);

/* Finds the head_dim / 2 pairs of a whole head. Returns false when a channel has no partner. */
bool kvant_rope_pairs(const kvant_rope *rope, uint32_t head_dim, kvant_pair *pairs);

/* Returns the RoPE with these n pairs of a whole head. frequencies: gets n numbers. */
kvant_rope kvant_rope_of_pairs(uint32_t n_dims, uint32_t interleaved, const kvant_pair *pairs,
                               uint32_t n, float *frequencies);

/* Checks a RoPE that a caller passed. KVANT_ERR_ARGUMENT, KVANT_ERR_NONFINITE. */
kvant_status kvant_rope_check(const kvant_rope *rope, uint32_t head_dim);

/* How many position buckets n_positions positions have. */
uint32_t kvant_rope_buckets(uint64_t n_positions);

/* The position bucket (learn.h of src/store) that has a position. */
uint32_t kvant_rope_bucket(const kvant_rope_state *rope_state, int32_t position);

/* edges[0] = the first position of a bucket, edges[1] = the position after its last one. */
void kvant_rope_bucket_edges(const kvant_rope_state *rope_state, uint32_t bucket, int32_t edges[2]);

/* Rotates vectors of one sub-head. If the positions of successive vectors differ by the same step,
 * no sines are computed. */
typedef struct kvant_rope_rotation {
    const kvant_pair *pairs; /* NULL: nothing is rotated */
    uint32_t n;
    bool halves; /* pair i is channels i and i + n */
    int64_t position, step;
    struct {
        double cosine[KVANT_MAX_HEAD_DIM / 2], sine[KVANT_MAX_HEAD_DIM / 2]; /* per pair */
    } at, by; /* at: the angles of the position; by: the angles of the step */
    float cosine[KVANT_MAX_HEAD_DIM / 2], sine[KVANT_MAX_HEAD_DIM / 2]; /* `at`, rounded */
} kvant_rope_rotation;

/* The first function prepares the rotation of a sub-head. Without a kvant_rope_state,
 * kvant_rope_rotate_back then does nothing. The second function prepares it for n pairs of a vector
 * of 2 n channels. */
void kvant_rope_rotation_begin(kvant_rope_rotation *rotation, const kvant_rope_state *rope_state,
                               uint32_t part);
void kvant_rope_rotation_over(kvant_rope_rotation *rotation, const kvant_pair *pairs, uint32_t n);

/* Says that the next positions will each be `step` further. cosine and sine hold the angles of such
 * a step for all pairs. */
void kvant_rope_rotation_expect(kvant_rope_rotation *rotation, int64_t step, const double *cosine,
                                const double *sine);

/* Sets rotation->cosine and rotation->sine to the angles of a position. */
void kvant_rope_rotation_move(kvant_rope_rotation *rotation, int64_t position);

/* Rotates x from a position back to position 0. A negative position rotates x from 0 forward to
 * -position. */
void kvant_rope_rotate_back(kvant_rope_rotation *rotation, int64_t position, float *x);

/* The mean rotations over every step-th position of a run of buckets. Making them takes longer than
 * applying them, so all kv heads share them. `apply` takes the mean (or NULL) and the full matrix
 * of second moments about 0 of a sub-head's vectors at position 0. It replaces both by their means
 * over these positions. KVANT_ERR_MEMORY. */
typedef struct kvant_rope_means kvant_rope_means;
kvant_status kvant_rope_means_new(const kvant_rope_state *rope_state, uint32_t part,
                                  kvant_bucket_span span, uint32_t step, kvant_rope_means **means);
void kvant_rope_means_apply(const kvant_rope_means *means, double *mean, double *moments);
void kvant_rope_means_free(kvant_rope_means *means); /* NULL: nothing happens */

/* Rotates a mean alone, to positions first to last. KVANT_ERR_MEMORY. */
kvant_status kvant_rope_mean(const kvant_rope_state *rope_state, uint32_t part, int32_t first,
                             int32_t last, double *mean);
