/* score.h - the distance of a model's next-token distributions from a reference's, as
 * llama-perplexity defines it.
 *
 * The reference has the format of llama-perplexity's files: 16-bit log-probabilities down to 16
 * nats below the most probable token. It takes half the memory of logits, and results can be
 * compared with llama-perplexity's. Like llama-perplexity, kvant leaves tokens that the reference
 * finds less probable than e^-16 out of the divergence. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct score_reference {
    size_t n_vocab, n_rows;
    uint16_t *codes;     /* n_rows x n_vocab; log p = floor + step * code */
    float *step, *floor; /* n_rows */
} score_reference;

/* Fields of 8 bytes only: files hold it as it is. */
typedef struct score_value {
    double nll;        /* -ln p(target) */
    double kld;        /* KL(reference || this), nats */
    uint64_t same_top; /* 1: the most probable token is the reference's */
} score_value;

/* Bytes of a reference, a multiple of 8; 0 when there are no such sizes. */
size_t score_reference_bytes(size_t n_rows, size_t n_vocab);

/* Lays the reference out in the caller's memory of score_reference_bytes() bytes, aligned to 8. */
score_reference score_reference_at(void *memory, size_t n_rows, size_t n_vocab);

/* Scores n rows of logits (n x n_vocab) against rows first .. first + n - 1 of the reference. With
 * `define`, these logits become the reference first. targets[i] is the token that follows row i.
 * Values do not depend on n_threads. False without threads or memory. */
bool score_rows(score_reference *reference, size_t first, bool define, const float *logits,
                const int32_t *targets, size_t n, unsigned n_threads, score_value *values);
