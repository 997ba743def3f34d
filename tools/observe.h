/* observe.h - watches llama.cpp's graphs and passes cached rows and their queries to a calibrator
 * or another receiver.
 *
 * Needs llama.cpp's own f16 cache with flash attention on the CPU: rows then arrive as f32 after
 * RoPE, and nothing is transposed. Every other case is refused with a message, never guessed.
 */
#pragma once

#include "llama_api.h"

#include <kvant/calibration.h>

#define OBSERVE_MAX_LAYERS 1024u

/* The parameters of flash attention: the factor on scores, ALiBi's largest slope, the logit
 * softcap. */
typedef struct observe_attention {
    float scale, max_bias, softcap;
} observe_attention;

/* Heads of a layer, learned from its attention node. n_kv_heads is 0 before that node was seen, and
 * for layers without attention. */
typedef struct observe_shape {
    uint32_t n_kv_heads, n_heads, head_dim[2]; /* by kvant_role */
    observe_attention attention;
    uint32_t n_visible; /* the most keys that a query saw; only while a sink is watched for */
} observe_shape;

/* Takes rows instead of a calibrator. Rows are floats, stride numbers apart: of all kv heads side
 * by side, or of one query head. False ends the graph. */
typedef struct observe_sink {
    bool (*rows)(void *user, uint32_t layer, kvant_role role, const float *rows, size_t stride,
                 size_t n);
    bool (*queries)(void *user, uint32_t layer, uint32_t head, const float *rows, size_t stride,
                    size_t n);
    void *user;
} observe_sink;

typedef struct observer {
    kvant_calibrator *calibrator; /* or a sink; both NULL: only learn shapes */
    const observe_sink *sink;
    observe_shape shapes[OBSERVE_MAX_LAYERS];
    uint32_t n_layers;
    uint64_t n_writes, n_queries; /* nodes that were read */
    char error[256];              /* empty while all is well */
} observer;

/* cb_eval of a context; user is an observer. First decode one token with neither calibrator nor
 * sink, then set one. */
bool observe_node(struct ggml_tensor *node, bool ask, void *user);
