/* reading.h - a model reads a text with llama.cpp's own f16 cache while an observer watches: the
 * shared part of calibrate and capture.
 *
 * Contexts have n_ctx tokens and begin with the model's BOS; batches have ENGINE_UBATCH tokens.
 * After Ctrl-C the current batch is finished, so a batch counts for all layers or for none.
 */
#pragma once

#include "engine.h"
#include "observe.h"

typedef struct reading {
    const char *command; /* "calibrate", for messages */
    engine *engine;      /* open */
    llama_token *tokens;
    size_t n_tokens;
    size_t text_tokens; /* of the whole text */
    size_t done;        /* tokens that reading_all has decoded */
    uint32_t n_ctx;
    /* Positions of contexts are spread over the range below n_positions; 0: all contexts begin at
     * position 0. */
    uint32_t n_positions;
    struct llama_context *ctx;
    struct llama_batch batch;
    observer observer;
    kv_config f16;
} reading;

typedef struct reading_text {
    const char *file; /* "-" is stdin */
    size_t at_most;   /* tokens used of it */
    size_t at_least;  /* fewer are refused */
    uint32_t n_parts; /* more than 1: whole contexts from this many parts of the text (spread.h) */
    uint32_t n_ctx;   /* refused when beyond the model's own limit */
} reading_text;

/* Loads the model and the text's tokens and learns the shapes of all layers. False after
 * complaining; close in any case. */
bool reading_open(reading *r, engine *e, const char *command, const reading_text *text);
void reading_close(reading *r);

/* Decodes the contexts from token `from` on (a multiple of n_ctx), batch by batch. on_batch is
 * called before each batch. After Ctrl-C the current batch is the last one. False after Ctrl-C, or
 * after complaining. */
bool reading_all(reading *r, size_t from, progress *p,
                 void (*on_batch)(void *user, size_t chunk, size_t start, size_t n), void *user);
