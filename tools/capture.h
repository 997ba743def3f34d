/* capture.h - writes real keys (after RoPE), values and queries of a model to a safetensors file.
 * kvant.tuning.captures, a part of the Python package, reads it.
 *
 * Tensors "layers.L.k", "layers.L.v" [n_kv_heads, tokens, head_dim] and "layers.L.q" [n_heads,
 * query rows, head_dim], all F16. The text is read in contexts of n_ctx tokens, one after another
 * along the dimension of tokens. The queries of positions query_step - 1, 2 query_step - 1, ... of
 * each context are kept. kvant/tuning/captures.py lists the metadata.
 */
#pragma once

#include "reading.h"
#include "safetensors.h"

typedef enum capture_kind { CAPTURE_K = 0, CAPTURE_V = 1, CAPTURE_Q = 2 } capture_kind;

typedef struct capture_plan {
    const char *path;   /* of the file */
    const char *text;   /* its name, for the metadata */
    const bool *layers; /* OBSERVE_MAX_LAYERS, those wanted; NULL: all */
    uint32_t query_step;
} capture_plan;

/* Counts and size of the file that capture_write() has written. */
typedef struct capture_summary {
    uint32_t n_layers;
    size_t n_queries; /* per head */
    uint64_t bytes;   /* of the file */
} capture_summary;

/* Reads the text of r to its end and writes the file. False after complaining or when interrupted;
 * a file that was there before stays as it was then. */
bool capture_write(reading *r, const capture_plan *plan, capture_summary *summary);
