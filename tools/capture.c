/* capture.c - writes captures: a sink of an observer that puts every row at its place in the
 * file. */
#include "capture.h"

#include "command.h"
#include "progress.h"

#include <kvant/kvant.h>
#include <stdio.h>
#include <stdlib.h>

typedef struct writer {
    reading *reading;
    const capture_plan *plan;
    safetensors file;
    safetensors_tensor windows;
    safetensors_tensor tensors[OBSERVE_MAX_LAYERS][3]; /* no bytes: not wanted */
    size_t chunk, start; /* the batch that is decoded: its context's first token, position in it */
    uint16_t *halves;    /* a batch of one head, and of one token of all heads */
} writer;

/* Rows of queries of a text, or of a context, that the plan keeps. */
static size_t query_rows(const writer *w, size_t n_tokens)
{
    const size_t n_ctx = w->reading->n_ctx, step = w->plan->query_step;
    return n_tokens / n_ctx * (n_ctx / step) + n_tokens % n_ctx / step;
}

static bool plan_tensor(writer *w, uint32_t layer, capture_kind kind, uint64_t heads, uint64_t rows,
                        uint64_t dim)
{
    static const char letters[] = "kvq";
    const uint64_t shape[3] = { heads, rows, dim };
    char name[32];
    snprintf(name, sizeof name, "layers.%lu.%c", (unsigned long)layer, letters[kind]);
    return safetensors_plan(&w->file, name, "F16", sizeof *w->halves, shape, 3,
                            &w->tensors[layer][kind]);
}

static bool plan_layer(writer *w, uint32_t layer)
{
    const reading *r = w->reading;
    const observe_shape *s = &r->observer.shapes[layer];
    const uint64_t queries = query_rows(w, r->n_tokens);
    if (s->n_kv_heads == 0 || (w->plan->layers != NULL && !w->plan->layers[layer]))
        return true;
    return plan_tensor(w, layer, CAPTURE_K, s->n_kv_heads, r->n_tokens, s->head_dim[0]) &&
           plan_tensor(w, layer, CAPTURE_V, s->n_kv_heads, r->n_tokens, s->head_dim[1]) &&
           plan_tensor(w, layer, CAPTURE_Q, s->n_heads, queries, s->head_dim[0]);
}

static bool wanted(const writer *w, uint32_t layer)
{
    return w->tensors[layer][CAPTURE_K].bytes > 0;
}

static void note_number(safetensors *file, const char *key, unsigned long long number)
{
    char text[32];
    snprintf(text, sizeof text, "%llu", number);
    safetensors_note(file, key, text);
}

/* Adds the parameters of attention to the metadata. Sliding windows are known only after the text
 * was read: plan_windows() reserves a tensor for them. */
static void note_attention(writer *w)
{
    for (uint32_t layer = 0; layer < w->reading->observer.n_layers; layer++) {
        const observe_attention *a = &w->reading->observer.shapes[layer].attention;
        char key[48], text[96];
        if (!wanted(w, layer))
            continue;
        snprintf(key, sizeof key, "layers.%lu.attention", (unsigned long)layer);
        snprintf(text, sizeof text, "%.9g %.9g %.9g", (double)a->scale, (double)a->max_bias,
                 (double)a->softcap);
        safetensors_note(&w->file, key, text);
    }
}

static void note_origin(writer *w)
{
    const reading *r = w->reading;
    const char *path = r->engine->options.model;
    char name[256], fingerprint[24];
    engine_model_name(r->engine, r->engine->cpu_model, name, sizeof name);
    snprintf(fingerprint, sizeof fingerprint, "%016llx",
             (unsigned long long)kvant_model_fingerprint(path));
    safetensors_note(&w->file, "format", "kvant-capture-1");
    safetensors_note(&w->file, "model", name);
    safetensors_note(&w->file, "model_fingerprint", fingerprint);
    safetensors_note(&w->file, "text", w->plan->text);
    note_number(&w->file, "tokens", r->n_tokens);
    note_number(&w->file, "ctx", r->n_ctx);
    note_number(&w->file, "query_step", w->plan->query_step);
    note_number(&w->file, "text_tokens", r->text_tokens);
    note_number(&w->file, "model_ctx",
                (unsigned long long)ll.llama_model_n_ctx_train(r->engine->cpu_model));
    safetensors_note(&w->file, "kvant", kvant_version());
}

/* Writes n_rows rows of dim numbers each, beginning at row `row` of the tensor. */
static bool write_rows(writer *w, uint32_t layer, capture_kind kind, uint64_t row, size_t n_rows,
                       size_t dim)
{
    const size_t row_bytes = dim * sizeof *w->halves;
    return safetensors_write(&w->file, &w->tensors[layer][kind], row * row_bytes, w->halves,
                             n_rows * row_bytes);
}

static bool take_rows(void *user, uint32_t layer, kvant_role role, const float *rows, size_t stride,
                      size_t n)
{
    writer *w = user;
    const capture_kind kind = role == KVANT_ROLE_K ? CAPTURE_K : CAPTURE_V;
    const observe_shape *s = &w->reading->observer.shapes[layer];
    const size_t dim = s->head_dim[role];
    bool ok = n <= ENGINE_UBATCH;
    for (uint32_t h = 0; h < s->n_kv_heads && ok && wanted(w, layer); h++) {
        for (size_t i = 0; i < n; i++)
            ll.ggml_fp32_to_fp16_row(rows + i * stride + h * dim, w->halves + i * dim,
                                     (int64_t)dim);
        ok = write_rows(w, layer, kind, (uint64_t)h * w->reading->n_tokens + w->chunk + w->start, n,
                        dim);
    }
    return ok;
}

static bool take_queries(void *user, uint32_t layer, uint32_t head, const float *rows,
                         size_t stride, size_t n)
{
    writer *w = user;
    const reading *r = w->reading;
    const size_t dim = r->observer.shapes[layer].head_dim[KVANT_ROLE_K], step = w->plan->query_step;
    const size_t per_head = query_rows(w, r->n_tokens);
    const size_t before = query_rows(w, w->chunk) + w->start / step;
    size_t kept = 0;
    if (n > ENGINE_UBATCH)
        return false;
    for (size_t i = 0; i < n; i++)
        if ((w->start + i + 1) % step == 0)
            ll.ggml_fp32_to_fp16_row(rows + i * stride, w->halves + kept++ * dim, (int64_t)dim);
    return !wanted(w, layer) || kept == 0 ||
           write_rows(w, layer, CAPTURE_Q, (uint64_t)head * per_head + before, kept, dim);
}

static void on_batch(void *user, size_t chunk, size_t start, size_t n)
{
    writer *w = user;
    (void)n;
    w->chunk = chunk;
    w->start = start;
}

static bool read_all(writer *w)
{
    const observe_sink sink = { .rows = take_rows, .queries = take_queries, .user = w };
    progress p;
    w->reading->observer.sink = &sink;
    progress_start(&p, (double)w->reading->n_tokens);
    const bool ok = reading_all(w->reading, 0, &p, on_batch, w);
    progress_end(&p);
    w->reading->observer.sink = NULL;
    return ok;
}

/* Reserves a tensor for the sliding window of each layer. Windows show in layers whose queries saw
 * fewer keys than the context has. The header is written before that is known, so the file has them
 * as a tensor. It is the first tensor, where numbers of 4 bytes are aligned. */
static bool plan_windows(writer *w)
{
    const uint64_t n = w->reading->observer.n_layers;
    return safetensors_plan(&w->file, "windows", "I32", sizeof(int32_t), &n, 1, &w->windows);
}

static bool write_windows(writer *w)
{
    const reading *r = w->reading;
    const size_t longest = r->n_tokens < r->n_ctx ? r->n_tokens : r->n_ctx;
    unsigned char bytes[4 * OBSERVE_MAX_LAYERS];
    for (uint32_t layer = 0; layer < r->observer.n_layers; layer++) {
        const uint32_t seen = r->observer.shapes[layer].n_visible,
                       window = seen < longest ? seen : 0;
        for (int i = 0; i < 4; i++)
            bytes[4 * layer + (uint32_t)i] = (unsigned char)(window >> 8 * i);
    }
    return safetensors_write(&w->file, &w->windows, 0, bytes, 4 * r->observer.n_layers);
}

static bool create(writer *w)
{
    const observer *o = &w->reading->observer;
    size_t largest = 0;
    bool ok = safetensors_begin(&w->file) && plan_windows(w);
    for (uint32_t layer = 0; layer < o->n_layers && ok; layer++) {
        ok = plan_layer(w, layer);
        for (int role = 0; role < 2; role++)
            largest = o->shapes[layer].head_dim[role] > largest ? o->shapes[layer].head_dim[role]
                                                                : largest;
    }
    w->halves = malloc((size_t)ENGINE_UBATCH * largest * sizeof *w->halves);
    if (!ok || w->halves == NULL)
        return ok && complain("%s: out of memory", w->reading->command);
    note_origin(w);
    note_attention(w);
    return safetensors_create(&w->file, w->plan->path);
}

static capture_summary summarize(const writer *w)
{
    capture_summary s = { .n_queries = query_rows(w, w->reading->n_tokens),
                          .bytes = w->file.data_at + w->file.data_bytes };
    for (uint32_t layer = 0; layer < OBSERVE_MAX_LAYERS; layer++)
        s.n_layers += wanted(w, layer);
    return s;
}

bool capture_write(reading *r, const capture_plan *plan, capture_summary *summary)
{
    writer *w = calloc(1, sizeof *w);
    if (w == NULL)
        return false;
    w->reading = r;
    w->plan = plan;
    const bool ok = create(w) && read_all(w) && write_windows(w) && safetensors_finish(&w->file);
    *summary = summarize(w);
    safetensors_close(&w->file);
    free(w->halves);
    free(w);
    return ok;
}
