/* eval_values.c - single values of an evaluation as a safetensors file. */
#include "eval_run.h"

#include "command.h"
#include "safetensors.h"

#include <kvant/kvant.h>
#include <stdio.h>
#include <stdlib.h>

enum { KLD = 0, NLL = 1, PER_CONFIGURATION = 2 };

typedef struct writer {
    const eval_run *run;
    safetensors file;
    safetensors_tensor tensors[MAX_CONFIGS + 1][PER_CONFIGURATION];
    double *numbers; /* of one tensor */
} writer;

static bool plan(writer *w)
{
    static const char *const names[PER_CONFIGURATION] = { "kld", "nll" };
    const eval_run *r = w->run;
    const uint64_t shape[2] = { r->texts.n_chunks, r->n_rows };
    bool ok = true;
    safetensors_note(&w->file, "format", "kvant-values-1");
    safetensors_note(&w->file, "kvant", kvant_version());
    for (size_t i = 0; i < r->n_tallies && ok; i++) {
        char key[48];
        snprintf(key, sizeof key, "configuration.%zu", i);
        safetensors_note(&w->file, key, r->tallies[i].config->label);
        for (int kind = 0; kind < PER_CONFIGURATION && ok; kind++) {
            char name[32];
            snprintf(name, sizeof name, "%s.%zu", names[kind], i);
            ok = safetensors_plan(&w->file, name, "F64", sizeof(double), shape, 2,
                                  &w->tensors[i][kind]);
        }
    }
    return ok;
}

static bool put(writer *w, size_t tally, int kind)
{
    const eval_run *r = w->run;
    const safetensors_tensor *t = &w->tensors[tally][kind];
    double *to = w->numbers;
    for (size_t chunk = 0; chunk < r->texts.n_chunks; chunk++) {
        const score_value *values = eval_values(r, &r->tallies[tally], chunk);
        for (size_t i = 0; i < r->n_rows; i++)
            *to++ = kind == KLD ? values[i].kld : values[i].nll;
    }
    return safetensors_write(&w->file, t, 0, w->numbers, t->bytes);
}

static bool put_all(writer *w)
{
    bool ok = true;
    for (size_t i = 0; i < w->run->n_tallies && ok; i++)
        ok = put(w, i, KLD) && put(w, i, NLL);
    return ok;
}

bool eval_values_write(const eval_run *r, const char *path)
{
    writer w = { .run = r };
    w.numbers = calloc(r->texts.n_chunks * r->n_rows, sizeof *w.numbers);
    if (w.numbers == NULL)
        return complain("eval: out of memory");
    const bool ok = safetensors_begin(&w.file) && plan(&w) && safetensors_create(&w.file, path) &&
                    put_all(&w) && safetensors_finish(&w.file);
    safetensors_close(&w.file);
    free(w.numbers);
    return ok;
}
