/* gathered.h - the state of a calibrator. calibrator.c gathers it, finish.c makes a calibration of
 * it, checkpoint.c saves and restores it. */
#pragma once

#include "format.h"

/* What is gathered for one layer and role; row = n_kv_heads x head_dim. Arrays lie one after another
 * in one block; a slot whose arrays have no numbers of a kind has NULL there. */
typedef struct kvant_calibrator_slot {
    uint32_t n_kv_heads, head_dim; /* 0: nothing was added */
    uint64_t n_rows, random;
    uint8_t *block;
    size_t bytes;
    double *sum;         /* row */
    float *min, *max;    /* row */
    uint64_t *n_queries; /* n_kv_heads */
    double *
        moment; /* of queries: n_kv_heads x head_dim x head_dim, lower triangles; keys only, as the next four */
    double *spread; /* of keys */
    double *attended, *attended_sum,
        *attended_weight; /* of keys as attention weighs them; row and n_kv_heads */
    uint16_t *sample;     /* sample_rows x row, fp16 as the engine's cache */
    float *
        centroids; /* as in the file: set by set, n_kv_heads x clusters x head_dim; NULL until clustered */
} kvant_calibrator_slot;

struct kvant_calibrator {
    char model[KVANT_CALIBRATION_MAX_NAME + 1];
    kvant_calibration_info info; /* what goes into the file's head */
    uint32_t sample_rows, n_threads;
    uint32_t n_layers; /* slots has two for each */
    kvant_calibrator_slot *slots;
};

/* Memory for a slot's arrays, zeroed, without centroids; the slot must be empty. index: 2 layer +
 * role. */
kvant_status kvant_calibrator_start_slot(const kvant_calibrator *calibrator, uint32_t index,
                                         uint32_t n_kv_heads, uint32_t head_dim);

/* Makes room for slots up to this layer's. */
kvant_status kvant_calibrator_grow(kvant_calibrator *calibrator, uint32_t layer);

/* Back to what it was after creation. */
void kvant_calibrator_clear(kvant_calibrator *calibrator);

/* Floats of all centroids of a slot. */
size_t kvant_calibrator_centroids(const kvant_calibrator *calibrator,
                                  const kvant_calibrator_slot *slot);

/* Whether k-means is asked for and still to be done. */
bool kvant_calibrator_to_cluster(const kvant_calibrator *calibrator,
                                 const kvant_calibrator_slot *slot);
