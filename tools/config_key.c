/* config_key.c - see config_key.h. */
#include "config_key.h"

#include "fingerprint.h"

#include <stdlib.h>

/* Everything that kvant is told, and the plug-in that is told it: another build may compute other numbers. */
uint64_t config_key(const kv_configs *list, const kv_config *c)
{
    uint64_t h = FINGERPRINT_START;
    const uint32_t numbers[] = { c->stock, c->accel, c->type_k, c->type_v };
    h = fingerprint_bytes(h, numbers, sizeof numbers);
    if (!c->stock || c->accel) {
        const uint64_t plugin = plugin_fingerprint();
        h = fingerprint_bytes(h, &plugin, sizeof plugin);
    }
    if (!c->stock) {
        const plugin_settings s = configs_plugin_settings(list, c);
        const uint64_t file = s.calibration != NULL ? fingerprint_whole_file(s.calibration) : 0;
        const uint64_t config = s.config != NULL ? fingerprint_whole_file(s.config) : 0;
        const uint64_t more[] = { s.protect, s.fp32, file, config };
        h = fingerprint_string(fingerprint_string(h, s.k), s.v);
        h = fingerprint_string(h, s.protect > 0 ? s.protect_codec : NULL);
        h = fingerprint_string(fingerprint_string(h, getenv("KVANT_SEED")), getenv(PLUGIN_ENV_CPU));
        h = fingerprint_bytes(h, more, sizeof more);
    }
    return h;
}
