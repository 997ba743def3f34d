/* preset.c - the presets: default codecs, chosen by measurement (quality.md). */
#include <kvant/settings.h>

#include <string.h>

#include "../base/attributes.h"

/* Keys pass through a calibration's matrix; without one, through a matrix that the cache learns from
 * the first keys and queries. Where it sees no queries, factors even out channels. Keys get the
 * bits beyond 4: an error of a key moves a whole row of probabilities, while errors of values
 * average out. A centre of values costs a page of fp16, a fifth of a bit per number at 2048
 * tokens, so only the preset for quality has it. At 2 bits a
 * matrix that was made from the rows themselves is worth more than a calibration, of values, too. */
static const struct {
    const char *name, *summary;
    struct {
        const char *k, *v;
    } calibrated, plain;
} presets[] = {
    { "quality",
      "5.1 to 5.3 bits: hard to tell from 8 bits",
      { "turboquant-6:transform=file", "trellis-4:center=file" },
      { "turboquant-6:transform=first", "trellis-4:center=first" } },
    { "balanced",
      "4.1 to 4.3 bits: what most want",
      { "trellis-4:transform=file", "trellis-4" },
      { "trellis-4:transform=first", "trellis-4" } },
    { "small",
      "3.1 to 3.3 bits: long contexts in little memory",
      { "trellis-3:transform=file", "trellis-3" },
      { "trellis-3:transform=first", "trellis-3" } },
    { "tiny",
      "2.1 to 2.3 bits: the longest contexts, at a loss that shows",
      { "trellis-2:transform=first", "trellis-2:transform=first" },
      { "trellis-2:transform=first", "trellis-2:transform=first" } },
};
enum { N_PRESETS = sizeof presets / sizeof *presets };

kvant_status kvant_preset_get(const char *name, int calibrated, kvant_preset *preset)
{
    KVANT_RETURN_IF(!name || !preset || preset->size != sizeof *preset, KVANT_ERR_ARGUMENT);
    for (size_t i = 0; i < N_PRESETS; i++)
        if (strcmp(presets[i].name, name) == 0) {
            *preset = (kvant_preset){ .size = sizeof *preset,
                                      .name = presets[i].name,
                                      .summary = presets[i].summary,
                                      .k = calibrated ? presets[i].calibrated.k : presets[i].plain.k,
                                      .v = calibrated ? presets[i].calibrated.v : presets[i].plain.v };
            return KVANT_OK;
        }
    return KVANT_ERR_ARGUMENT;
}
