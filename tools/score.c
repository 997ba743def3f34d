/* score.c - log-softmax, packed reference, divergence; rows are shared out between threads. */
#include "score.h"

#include "os.h"

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>

#define SPAN 16.0f /* nats below the top that the packed reference keeps */
#define TOP_CODE 65535.0f

size_t score_reference_bytes(size_t n_rows, size_t n_vocab)
{
    const size_t most = SIZE_MAX / 4;
    if (n_rows == 0 || n_vocab == 0 || n_vocab > most / sizeof(uint16_t) / n_rows)
        return 0;
    return (n_rows * (2 * sizeof(float) + n_vocab * sizeof(uint16_t)) + 7) / 8 * 8;
}

score_reference score_reference_at(void *memory, size_t n_rows, size_t n_vocab)
{
    float *floats = memory;
    return (score_reference){ .n_vocab = n_vocab,
                              .n_rows = n_rows,
                              .codes = (uint16_t *)(floats + 2 * n_rows),
                              .step = floats,
                              .floor = floats + n_rows };
}

typedef struct row_summary {
    float top, bottom;
    size_t top_index;
    float log_sum; /* ln sum e^(logit - top) */
} row_summary;

static row_summary summarise(const float *logits, size_t n)
{
    row_summary s = { .top = logits[0], .bottom = logits[0] };
    for (size_t i = 1; i < n; i++) {
        if (logits[i] > s.top) {
            s.top = logits[i];
            s.top_index = i;
        }
        if (logits[i] < s.bottom)
            s.bottom = logits[i];
    }
    double sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += expf(logits[i] - s.top);
    s.log_sum = (float)log(sum);
    return s;
}

static void define_row(score_reference *r, size_t row, const float *logits, const row_summary *s)
{
    uint16_t *codes = r->codes + row * r->n_vocab;
    const float bottom = s->bottom > s->top - SPAN ? s->bottom : s->top - SPAN;
    const float step = (s->top - bottom) / TOP_CODE;
    r->step[row] = step;
    r->floor[row] = bottom - s->top - s->log_sum;
    for (size_t i = 0; i < r->n_vocab; i++) {
        const float code = step > 0 && logits[i] > bottom ? (logits[i] - bottom) / step : 0;
        codes[i] = (uint16_t)fminf(nearbyintf(code), TOP_CODE);
    }
}

static score_value compare_row(const score_reference *r, size_t row, const float *logits,
                               const row_summary *s, int32_t target)
{
    const uint16_t *codes = r->codes + row * r->n_vocab;
    const float step = r->step[row], floor = r->floor[row], log_total = s->top + s->log_sum;
    double kld = 0;
    size_t top_index = 0;
    for (size_t i = 0; i < r->n_vocab; i++) {
        if (codes[i] > codes[top_index])
            top_index = i;
        const float log_p = floor + step * (float)codes[i];
        if (log_p > -SPAN)
            kld += expf(log_p) * (log_p - (logits[i] - log_total));
    }
    return (score_value){ .nll = log_total - logits[target],
                          .kld = kld,
                          .same_top = top_index == s->top_index };
}

typedef struct job {
    score_reference *reference;
    size_t first, n;
    bool define;
    const float *logits;
    const int32_t *targets;
    score_value *values;
    atomic_size_t next;
} job;

static void *work(void *user)
{
    job *j = user;
    for (;;) {
        const size_t i = atomic_fetch_add(&j->next, 1);
        if (i >= j->n)
            return NULL;
        const float *logits = j->logits + i * j->reference->n_vocab;
        const row_summary s = summarise(logits, j->reference->n_vocab);
        if (j->define)
            define_row(j->reference, j->first + i, logits, &s);
        j->values[i] = compare_row(j->reference, j->first + i, logits, &s, j->targets[i]);
    }
}

bool score_rows(score_reference *reference, size_t first, bool define, const float *logits,
                const int32_t *targets, size_t n, unsigned n_threads, score_value *values)
{
    enum { MAX_THREADS = 64 };
    pthread_t threads[MAX_THREADS];
    job j = { .reference = reference,
              .first = first,
              .n = n,
              .define = define,
              .logits = logits,
              .targets = targets,
              .values = values };
    if (first > reference->n_rows || n > reference->n_rows - first)
        return false;
    unsigned started = 0;
    while (started + 1 < n_threads && started < MAX_THREADS &&
           kvant_os_start_thread(&threads[started], work, &j, 0))
        started++;
    work(&j); /* this thread takes part, so that failing to start others costs time only */
    for (unsigned i = 0; i < started; i++)
        pthread_join(threads[i], NULL);
    return true;
}
