/* layer_error.h - the error that a codec causes in attention's output of one layer, on captured
 * keys, values and queries: a cheap substitute for its effect on the model.
 *
 * Rows pass through the library's own cache (centre, windows and all). The error is sum |o' - o|^2
 * / sum |o|^2 over the kept queries of the second half of every context and over all heads. o is
 * the output with captured rows; o' has either keys or values as the cache returns them. A kv
 * head's part has only its own query heads in the first sum.
 */
#ifndef KVANT_TOOLS_LAYER_ERROR_H
#define KVANT_TOOLS_LAYER_ERROR_H

#include "capture.h"

typedef struct layer_rows {
    const capture *capture;
    uint32_t layer;
    float *rows[2]; /* by role: tokens x n_kv_heads x head_dim */
    float *queries; /* n_heads x query rows x head_dim */
    float *weights; /* softmax of every query that counts, see layer_error.c */
    float *outputs;
    size_t *positions; /* tokens of the queries that count */
    size_t *query_rows;
    size_t n_queries;
} layer_rows;

/* Loads a layer and computes its attention. False with a line in err; layer_rows_free in any
 * case. */
bool layer_rows_load(layer_rows *l, const capture *c, uint32_t layer, char *err, size_t errlen);
void layer_rows_free(layer_rows *l);

/* The error of a codec: errors[h] is the part of kv head h, and their sum is the layer's. False
 * when the codec cannot be made or refuses the rows. */
bool layer_error(const layer_rows *l, kvant_role role, const char *spec, const kvant_calibration *calibration,
                 uint32_t n_threads, double *errors, char *err, size_t errlen);

#endif /* KVANT_TOOLS_LAYER_ERROR_H */
