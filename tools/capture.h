/* capture.h - real keys (after RoPE), values and queries of a model in a safetensors file. `kvant
 * capture` and `kvant tune` write it, `kvant tune` reads it.
 *
 * Tensors "layers.L.k", "layers.L.v" [n_kv_heads, tokens, head_dim] and "layers.L.q" [n_heads,
 * query rows, head_dim], all F16. The text is read in contexts of n_ctx tokens, one after another
 * along the dimension of tokens. The queries of positions query_step - 1, 2 query_step - 1, ... of
 * each context are kept. docs/tuning.md lists the metadata.
 */
#ifndef KVANT_TOOLS_CAPTURE_H
#define KVANT_TOOLS_CAPTURE_H

#include "reading.h"
#include "safetensors.h"

typedef enum capture_kind { CAPTURE_K = 0, CAPTURE_V = 1, CAPTURE_Q = 2 } capture_kind;

typedef struct capture_plan {
    const char *path;   /* of the file */
    const char *text;   /* its name, for the metadata */
    const bool *layers; /* OBSERVE_MAX_LAYERS, those wanted; NULL: all */
    uint32_t query_step;
} capture_plan;

/* Reads the text of r to its end and writes the file. False after complaining or when interrupted;
 * a file that was there before stays as it was then. */
bool capture_write(reading *r, const capture_plan *plan);

typedef struct capture_layer {
    uint32_t n_kv_heads, n_heads, head_dim[2]; /* n_kv_heads 0: not in the file */
    observe_attention attention;
    uint32_t window; /* keys that a query sees at most; 0: all before it */
    const safetensors_tensor *tensors[3];
} capture_layer;

typedef struct capture {
    safetensors file;
    capture_layer layers[OBSERVE_MAX_LAYERS];
    uint32_t n_layers; /* the highest in the file, plus one */
    size_t n_tokens;
    uint32_t n_ctx, query_step;
    uint64_t model_fingerprint;
} capture;

/* Checks everything that the file says. False with a line in err; capture_close is needed in any
 * case. */
bool capture_open(capture *c, const char *path, char *err, size_t errlen);
void capture_close(capture *c);

/* Rows of queries of a text, or of a context, that the plan keeps. */
size_t capture_query_rows(size_t n_tokens, uint32_t n_ctx, uint32_t query_step);

/* Rows first .. first + n - 1 of one head as floats. */
bool capture_rows(const capture *c, uint32_t layer, capture_kind kind, uint32_t head, size_t first, size_t n,
                  float *rows, char *err, size_t errlen);

#endif /* KVANT_TOOLS_CAPTURE_H */
