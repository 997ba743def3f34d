/* kv_report.c - the line at a context's start: the size of the cache, how long it is f16, and the
 * layers that are not compressed. The file kv_bind.c owns the state that it prints. */
#include <stdatomic.h>
#include <stdio.h>

#include "kv_layers.h"
#include "log.h"

/* The number of layers of the model, as far as its file says. llama.cpp may give the last layers to
 * another device. */
static uint32_t count_layers(const struct kvp_layers *layers)
{
    const uint32_t states = layers->kinds.states_end;
    const uint32_t here = layers->n > states ? layers->n : states;
    char model[KVP_MODEL_PATH];
    kvp_model_layers file = { 0 };

    if (kvp_find_model(model))
        file = kvp_count_model_layers(model);
    if (states == 0)
        file.all = file.with_keys;
    return file.all > here ? file.all : here;
}

/* Describes how KVANT_EXACT (default: auto) acts on this context, or why it does nothing. */
static void describe_in_place(struct kvp_layers *layers, char *text, size_t size)
{
    const kvp_kv_size *full = &layers->full;
    const bool asked = layers->settings.wants_exact;
    const bool streams = layers->n_streams > 1 && layers->settings.exact > 0;
    char exact[64] = "";

    if (layers->exact.first > 0 || layers->exact.newest > 0)
        snprintf(exact, sizeof(exact), " with the first %u and newest %u tokens exact",
                 layers->exact.first, layers->exact.newest);
    if (layers->in_place >= layers->n_positions && layers->in_place < SIZE_MAX)
        snprintf(text, size, "; f16 itself for all %llu tokens", (unsigned long long)full->cells);
    else if (layers->in_place > 0 && layers->in_place < SIZE_MAX)
        snprintf(text, size, "; f16 itself for the first %zu of %llu tokens, then %.1f bits%s",
                 layers->in_place, (unsigned long long)full->cells,
                 full->codec_bits / (full->numbers[0] + full->numbers[1]), exact);
    else if (asked && layers->n_streams > 1)
        snprintf(text, size,
                 "; KVANT_EXACT does nothing with several streams: set -np 1 or --kv-unified");
    else if (asked && !layers->on_gpu && !kvp_layers_in_cpu_graphs(layers))
        snprintf(text, size,
                 "; KVANT_EXACT does nothing where llama.cpp's CPU back end does not compute the "
                 "cache (another GPU, KVANT_HOST_THREADS=0): unset it");
    else if (asked)
        snprintf(text, size, "; KVANT_EXACT does nothing where fewer than %u tokens fit: unset it",
                 KVP_CELLS_PADDING);
    else if (layers->in_place < SIZE_MAX)
        snprintf(text, size, "; compressed from the first token%s%s%s", exact[0] ? "," : "", exact,
                 streams ? "; f16 at first with -np 1 or --kv-unified" : "");
}

/* Says once per process that states hold codes, if the user did not ask for them. */
static void report_states(const struct kvp_layers *layers)
{
    static atomic_flag said = ATOMIC_FLAG_INIT;

    if (layers->settings.chose_codes && !atomic_flag_test_and_set(&said))
        kvp_info("saved states are as small as the cache, and only kvant reads them; "
                 "KVANT_STATES=rows saves f16 rows");
}

/* Prints the line. llama.cpp may give the first or the last layers to another device, where their
 * caches stay uncompressed. */
void kvp_layers_report(struct kvp_layers *layers)
{
    const double mib = 1048576.0;
    const kvp_kv_size *full = &layers->full;
    const double working = full->working + (double)layers->n_here * (double)layers->queries;
    char learning[64] = "", attention[64] = "", in_place[192] = "", latents[256];
    uint32_t n;

    if (layers->reported || layers->refused)
        return;
    layers->reported = true;
    n = count_layers(layers);
    if (working > 0)
        snprintf(learning, sizeof(learning), ", and %.1f MiB while it learns", working / mib);
    if (layers->on_gpu)
        snprintf(attention, sizeof(attention), ", and %.1f MiB for attention",
                 (double)layers->attention / mib);
    kvp_mla_describe(&layers->settings, latents, sizeof(latents));
    describe_in_place(layers, in_place, sizeof(in_place));
    kvp_info("KV cache %s: %.2f bits per number, %u of %u layers, %.1f MiB for %llu tokens "
             "(f16: %.1f MiB)%s%s%s%s",
             layers->settings.label, kvp_kv_size_bits(full),
             layers->n_here < n ? layers->n_here : n, n, full->bytes / mib,
             (unsigned long long)full->cells, 2 * (full->numbers[0] + full->numbers[1]) / mib,
             learning, attention, in_place, layers->latents ? latents : layers->settings.remark);
    report_states(layers);
    if (layers->rotated)
        kvp_info("the GPU rotates by Hadamard matrices instead of rotate=dense, because head_dim "
                 "is not a power of two: the codecs of the preset differ from the codecs on a CPU");
    kvp_layer_kinds_report(&layers->kinds, n);
    if (layers->n_here < n && layers->kinds.n_states == 0)
        kvp_error(
            "warning: only %u of %u layers have a compressed cache, the other %u keep llama.cpp's "
            "own: set -ngl 99, or start the program by kvant exec with -m model.gguf",
            layers->n_here, n, n - layers->n_here);
}

void kvp_kv_context_follows(struct kvp_layers *layers)
{
    if (layers != NULL && layers->n_tensors == 0)
        layers->reported = true;
}

void kvp_kv_context_check(struct kvp_layers *layers)
{
    if (layers != NULL && layers->n_bound > 0)
        kvp_layers_report(
            layers); /* no attention reads some of the tensors, so they stay unbound */
    if (layers == NULL || layers->reported || layers->n_tensors > 0)
        return;
    layers->reported = true;
    kvp_layer_kinds_report(&layers->kinds, count_layers(layers));
    if (layers->kinds.elsewhere && !layers->kinds.keys_only)
        kvp_error("warning: no layer has a compressed cache, because llama.cpp keeps all of it "
                  "itself: leave out -ngl 0 and --no-kv-offload");
}
