/* preset.c - the presets: default codecs, chosen by measurement (results.md). */
#include <kvant/settings.h>

#include <string.h>

#include "../base/abi.h"
#include "../base/attributes.h"

/* Keys pass through a calibration's matrix or, without a calibration, through a matrix that the
 * cache learns from the first keys and queries. If the cache sees no queries, scales even out the
 * channels. Keys get the bits above 4, because an error of a key changes a whole row of
 * probabilities, while errors of values average out. A centre of values takes a page of fp16, a
 * fifth of a bit per number at 2048 tokens, so only the preset quality has one. At 2 bits a matrix
 * that was made from the rows themselves is worth more than a calibration, for values, too. There
 * the bits that longer rows save on scales go to keys. */
static const struct {
    const char *name, *summary;
    struct {
        const char *k, *v;
    } calibrated, plain;
    const char *more_k;
} presets[] = {
    { "quality",
      "5.1 to 5.3 bits: hard to tell from 8 bits",
      { "turboquant-6:transform=file", "trellis-4:center=file" },
      { "turboquant-6:transform=first", "trellis-4:center=first" },
      NULL },
    { "balanced",
      "4.1 to 4.3 bits: what most want",
      { "trellis-4:transform=file", "trellis-4" },
      { "trellis-4:transform=first", "trellis-4" },
      NULL },
    { "small",
      "3.1 to 3.3 bits: long contexts in little memory",
      { "trellis-3:transform=file", "trellis-3" },
      { "trellis-3:transform=first", "trellis-3" },
      NULL },
    { "tiny",
      "2.2 to 2.3 bits: the longest contexts, at a loss that shows",
      { "trellis-2:transform=first", "trellis-2:transform=first" },
      { "trellis-2:transform=first", "trellis-2:transform=first" },
      "trellis-3:transform=first" },
};
enum { N_PRESETS = sizeof presets / sizeof *presets };

kvant_status kvant_preset_get(const char *name, int calibrated, kvant_preset *preset)
{
    KVANT_RETURN_IF(!name, KVANT_ERR_ARGUMENT);
    for (size_t i = 0; i < N_PRESETS; i++)
        if (strcmp(presets[i].name, name) == 0) {
            const kvant_preset full = {
                .name = presets[i].name,
                .summary = presets[i].summary,
                .k = calibrated ? presets[i].calibrated.k : presets[i].plain.k,
                .v = calibrated ? presets[i].calibrated.v : presets[i].plain.v,
                .more_k = presets[i].more_k,
            };
            return KVANT_RETURN_STRUCT(kvant_preset, preset, &full, more_k) ? KVANT_OK
                                                                            : KVANT_ERR_ARGUMENT;
        }
    return KVANT_ERR_ARGUMENT;
}

/* How many of the first n layers have more_k: as many as the bits pay for that keys and values
 * save. They save 2 (16/64 - 16/head_dim) bits per number of keys. The result does not depend on
 * the model's number of layers, which an engine may learn late. */
static uint64_t paid_layers(uint64_t n, uint32_t head_dim)
{
    return head_dim > 64 ? n * (head_dim - 64) / (2 * (uint64_t)head_dim) : 0;
}

const char *kvant_preset_spec(const kvant_preset *preset, kvant_role role, uint32_t layer,
                              uint32_t head_dim)
{
    kvant_preset p;
    if (!KVANT_ACCEPT_STRUCT(kvant_preset, &p, preset, more_k))
        return NULL;
    const bool more = paid_layers((uint64_t)layer + 1, head_dim) > paid_layers(layer, head_dim);
    return role == KVANT_ROLE_V ? p.v : p.more_k && more ? p.more_k : p.k;
}
