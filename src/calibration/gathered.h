/* gathered.h - the state of a calibrator. calibrator.c gathers it, finish.c makes a calibration
 * from it, checkpoint.c saves and restores it. */
#pragma once

#include "format.h"

/* The statistics of one layer and role. A row has n_kv_heads x head_dim numbers. The arrays lie one
 * after another in one block. An array without numbers is NULL. */
typedef struct kvant_calibrator_slot {
    uint32_t n_kv_heads, head_dim; /* 0: nothing was added */
    uint64_t n_rows, random;
    uint8_t *block;
    size_t bytes;
    double *sum;         /* row */
    float *min, *max;    /* row */
    uint64_t *n_queries; /* n_kv_heads */
    /* Sums of outer products, for keys only: n_kv_heads x head_dim x head_dim, lower triangles.
     * `moment` is over queries, `spread` over keys, and `attended` over keys weighted by
     * attention. */
    double *moment;
    double *spread;
    double *attended, *attended_sum, *attended_weight; /* attended_sum: row; weight: n_kv_heads */
    uint16_t *sample; /* sample_rows x row, fp16 as in the engine's cache */
    /* As in the file: set by set, n_kv_heads x clusters x head_dim. NULL until clustered. */
    float *centroids;
} kvant_calibrator_slot;

struct kvant_calibrator {
    char model[KVANT_CALIBRATION_MAX_NAME + 1];
    kvant_calibration_info info; /* for the head of the file */
    uint32_t sample_rows, n_threads;
    uint32_t n_layers; /* there are two slots per layer */
    kvant_calibrator_slot *slots;
};

/* Allocates a slot's arrays, zeroed, without centroids. The slot must be empty. index: 2 layer +
 * role. */
kvant_status kvant_calibrator_start_slot(const kvant_calibrator *calibrator, uint32_t index,
                                         uint32_t n_kv_heads, uint32_t head_dim);

/* Makes room for the slots of all layers up to this one. */
kvant_status kvant_calibrator_grow(kvant_calibrator *calibrator, uint32_t layer);

/* Resets a calibrator to its state after creation. */
void kvant_calibrator_clear(kvant_calibrator *calibrator);

/* How many floats all centroids of a slot have. */
size_t kvant_calibrator_centroids(const kvant_calibrator *calibrator,
                                  const kvant_calibrator_slot *slot);

/* Whether the caller wants k-means and this slot's is still to be done. */
bool kvant_calibrator_to_cluster(const kvant_calibrator *calibrator,
                                 const kvant_calibrator_slot *slot);
