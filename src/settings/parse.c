/* parse.c - reads the settings file of settings.md: one statement per line, the checksum last. A
 * whole line is checked before it is stored. An error names the line. */
#include "settings_internal.h"

#include <inttypes.h>
#include <string.h>

#include "../base/fnv.h"

#define CHECK_BYTES (sizeof KVANT_SETTINGS_CHECK - 1 + 16 + 1) /* of the last line, with newline */

/* The rest of a line, and the context of its errors. */
typedef struct line {
    const char *at, *end;
    uint32_t number;
    const kvant_error *error;
} line;

static kvant_status wrong(const line *l, const char *what)
{
    return kvant_fail(l->error, KVANT_ERR_FORMAT, "line %" PRIu32 ": %s", l->number, what);
}

static bool take(line *l, const char *text)
{
    size_t n = strlen(text);
    if ((size_t)(l->end - l->at) < n || memcmp(l->at, text, n) != 0)
        return false;
    l->at += n;
    return true;
}

/* Reads a decimal number from 0 to max. A leading zero is refused, so that a number can be written
 * in one way only. */
static bool take_number(line *l, uint32_t max, uint32_t *number)
{
    const char *start = l->at;
    uint64_t value = 0;
    while (l->at < l->end && *l->at >= '0' && *l->at <= '9' && value <= max)
        value = value * 10 + (uint64_t)(*l->at++ - '0');
    *number = (uint32_t)value;
    return l->at > start && value <= max && (*start != '0' || l->at == start + 1);
}

static bool take_hex(line *l, uint64_t *number)
{
    if (l->end - l->at < 16)
        return false;
    *number = 0;
    for (int i = 0; i < 16; i++) {
        static const char digits[] = "0123456789abcdef";
        const char *digit = memchr(digits, *l->at++, 16);
        if (!digit)
            return false;
        *number = *number << 4 | (uint64_t)(digit - digits);
    }
    return true;
}

/* Reads the rest of the line, which must not be empty. text has room for max bytes and a zero. */
static bool take_rest(line *l, char *text, size_t max)
{
    size_t n = (size_t)(l->end - l->at);
    if (n == 0 || n > max)
        return false;
    memcpy(text, l->at, n);
    text[n] = 0;
    l->at = l->end;
    return true;
}

static kvant_status read_model(kvant_settings *s, line *l)
{
    if (s->model[0])
        return wrong(l, "the model is named twice");
    return take_rest(l, s->model, KVANT_SETTINGS_MAX_NAME)
               ? KVANT_OK
               : wrong(l, "a model's name has 1 to 255 bytes");
}

static kvant_status read_fingerprint(kvant_settings *s, line *l)
{
    if (s->model_fingerprint)
        return wrong(l, "the fingerprint is given twice");
    if (!take_hex(l, &s->model_fingerprint) || l->at != l->end || !s->model_fingerprint)
        return wrong(l, "a fingerprint has 16 digits, 0 to 9 and a to f, and is not 0");
    return KVANT_OK;
}

static kvant_status read_layers(kvant_settings *s, line *l)
{
    uint32_t n;
    if (s->entries)
        return wrong(l, "the number of layers is given twice");
    if (!take_number(l, KVANT_SETTINGS_MAX_LAYERS, &n) || l->at != l->end || n == 0)
        return wrong(l, "the number of layers is 1 to 4096");
    return kvant_settings_set_layers(s, n, l->error);
}

static kvant_status read_calibration(kvant_settings *s, line *l)
{
    if (s->calibration[0])
        return wrong(l, "the calibration is given twice");
    if (!take_hex(l, &s->calibration_checksum) || !take(l, " ") ||
        !take_rest(l, s->calibration, KVANT_SETTINGS_MAX_PATH))
        return wrong(
            l, "calibration is followed by a checksum of 16 digits and a name of 1 to 1023 bytes");
    return KVANT_OK;
}

#define ALL_HEADS UINT32_MAX

/* A piece of a list of layers: "N" or "N-M" with all kv heads, or "N/H" for kv head H of layer
 * N. */
typedef struct piece {
    uint32_t first, last, head;
} piece;

static bool take_piece(line *l, const kvant_settings *s, piece *p)
{
    p->head = ALL_HEADS;
    if (!take_number(l, s->n_layers - 1, &p->first))
        return false;
    p->last = p->first;
    if (take(l, "/"))
        return take_number(l, KVANT_SETTINGS_MAX_KV_HEADS - 1, &p->head);
    return !take(l, "-") || (take_number(l, s->n_layers - 1, &p->last) && p->last > p->first);
}

/* The shape and the spec that a line gives its layers. */
typedef struct statement {
    uint32_t n_kv_heads, head_dim;
    char spec[KVANT_SPEC_MAX_LENGTH + 1];
} statement;

static kvant_status wrong_layer(const line *l, kvant_role role, uint32_t layer, const char *what)
{
    return kvant_fail(l->error, KVANT_ERR_FORMAT, "line %" PRIu32 ": %s of layer %" PRIu32 " %s",
                      l->number, role == KVANT_ROLE_K ? "keys" : "values", layer, what);
}

/* Makes room for the specs of a layer, if the line is the first that names it. */
static kvant_status open_layer(kvant_settings *s, kvant_settings_entry *to, const statement *said,
                               uint32_t head, const line *l)
{
    char reason[128] = "";
    kvant_error inner = { reason, sizeof reason };
    if (to->head_dim)
        return KVANT_OK;
    kvant_status status = kvant_settings_open_entry(
        s, to, said->n_kv_heads, said->head_dim, head == ALL_HEADS ? 1 : said->n_kv_heads, &inner);
    return status == KVANT_OK
               ? status
               : kvant_fail(l->error, status == KVANT_ERR_ARGUMENT ? KVANT_ERR_FORMAT : status,
                            "line %" PRIu32 ": %s", l->number, reason);
}

static kvant_status fill_layer(kvant_settings *s, uint32_t layer, kvant_role role,
                               const statement *said, uint32_t head, const line *l)
{
    kvant_settings_entry *to = &s->entries[2 * layer + (uint32_t)role];
    const uint32_t index = head == ALL_HEADS ? 0 : head;
    if (head != ALL_HEADS && head >= said->n_kv_heads)
        return wrong_layer(l, role, layer, "do not have that kv head");
    KVANT_FORWARD(open_layer(s, to, said, head, l));
    if (to->n_kv_heads != said->n_kv_heads || to->head_dim != said->head_dim)
        return wrong_layer(l, role, layer, "are given two shapes");
    if (index >= to->n_specs || (head == ALL_HEADS && to->n_specs > 1) || to->specs[index])
        return wrong_layer(l, role, layer, "are given twice");
    kvant_settings_set_spec(to, index, said->spec);
    return KVANT_OK;
}

/* Reads the part of a line after the list of layers: "3x64 SPEC". */
static kvant_status read_statement(line *l, statement *said)
{
    char reason[256] = "";
    kvant_error inner = { reason, sizeof reason };
    if (!take(l, " ") || !take_number(l, KVANT_SETTINGS_MAX_KV_HEADS, &said->n_kv_heads) ||
        !take(l, "x") || !take_number(l, KVANT_MAX_HEAD_DIM, &said->head_dim) || !take(l, " "))
        return wrong(l,
                     "layers are followed by their shape, kv heads x head_dim, as in 0-3,7 3x64");
    if (!take_rest(l, said->spec, KVANT_SPEC_MAX_LENGTH))
        return wrong(l, "the shape is followed by a codec spec of 1 to 255 bytes");
    const kvant_settings_layer layer = { .spec = said->spec,
                                         .n_kv_heads = said->n_kv_heads,
                                         .head_dim = said->head_dim };
    return kvant_settings_check_entry(&layer, &inner) == KVANT_OK ? KVANT_OK : wrong(l, reason);
}

static kvant_status read_codec(kvant_settings *s, line *l, kvant_role role)
{
    statement said = { .n_kv_heads = 0 };
    piece p;
    if (!s->entries)
        return wrong(l, "the number of layers has to come before the codecs");
    line list = *l;
    do {
        if (!take_piece(l, s, &p))
            return kvant_fail(l->error, KVANT_ERR_FORMAT,
                              "line %" PRIu32
                              ": layers are written as 0-3,7 or, for kv head 1 of layer 7, 7/1; "
                              "they are 0 to %" PRIu32,
                              l->number, s->n_layers - 1);
    } while (take(l, ","));
    KVANT_FORWARD(read_statement(l, &said));
    do {
        take_piece(&list, s, &p);
        for (uint32_t layer = p.first; layer <= p.last; layer++)
            KVANT_FORWARD(fill_layer(s, layer, role, &said, p.head, l));
    } while (take(&list, ","));
    return KVANT_OK;
}

static kvant_status read_version(line *l)
{
    uint32_t version;
    if (!take(l, "kvant-settings ") || !take_number(l, 1000000, &version) || l->at != l->end)
        return wrong(l, "this is not a settings file of kvant: it begins with kvant-settings 1");
    if (version == KVANT_SETTINGS_VERSION)
        return KVANT_OK;
    return kvant_fail(l->error, KVANT_ERR_FORMAT,
                      "the settings file has version %" PRIu32
                      ", this library reads version %u: make it again with kvant tune",
                      version, KVANT_SETTINGS_VERSION);
}

static kvant_status read_line(kvant_settings *s, line *l)
{
    for (const char *c = l->at; c < l->end; c++)
        if ((unsigned char)*c < 0x20 || *c == 0x7f)
            return wrong(l, "it holds a control character");
    if (l->number == 1)
        return read_version(l);
    if (take(l, "model "))
        return read_model(s, l);
    if (take(l, "fingerprint "))
        return read_fingerprint(s, l);
    if (take(l, "layers "))
        return read_layers(s, l);
    if (take(l, "calibration "))
        return read_calibration(s, l);
    if (take(l, "k "))
        return read_codec(s, l, KVANT_ROLE_K);
    if (take(l, "v "))
        return read_codec(s, l, KVANT_ROLE_V);
    return wrong(l,
                 "it does not begin with model, fingerprint, layers, calibration, k, v or check");
}

/* Checks the last line against the lines before it, which have *body bytes. */
static kvant_status check_sum(const char *text, size_t n, size_t *body, const kvant_error *error)
{
    uint64_t stated;
    if (n < CHECK_BYTES || text[n - 1] != '\n')
        return kvant_fail(error, KVANT_ERR_FORMAT,
                          "the settings file is cut short: its last line is not a checksum; make "
                          "it again with kvant tune");
    *body = n - CHECK_BYTES;
    line l = { .at = text + *body, .end = text + n - 1 };
    if ((*body > 0 && text[*body - 1] != '\n') || !take(&l, KVANT_SETTINGS_CHECK) ||
        !take_hex(&l, &stated))
        return kvant_fail(error, KVANT_ERR_FORMAT,
                          "the settings file is cut short: its last line is not a checksum; make "
                          "it again with kvant tune");
    if (stated != kvant_fnv1a(KVANT_FNV_START, text, *body))
        return kvant_fail(
            error, KVANT_ERR_FORMAT,
            "the settings file is damaged or was changed by hand: its checksum does not match; "
            "make it again with kvant tune");
    return KVANT_OK;
}

static bool is_complete(const kvant_settings_entry *entry)
{
    for (uint32_t index = 0; index < entry->n_specs; index++)
        if (!entry->specs[index])
            return false;
    return entry->n_specs > 0;
}

static kvant_status complete(kvant_settings *s, const kvant_error *error)
{
    if (!s->entries)
        return kvant_fail(error, KVANT_ERR_FORMAT,
                          "the settings file does not say how many layers there are");
    for (uint32_t i = 0; i < 2 * s->n_layers; i++) {
        if (!is_complete(&s->entries[i]))
            return kvant_fail(error, KVANT_ERR_FORMAT,
                              "the settings file has no codec for %s of layer %" PRIu32 "%s",
                              i % 2 ? "values" : "keys", i / 2,
                              s->entries[i].n_specs > 0 ? " in one of its kv heads" : "");
        kvant_settings_close_entry(s, &s->entries[i]);
    }
    return KVANT_OK;
}

kvant_status kvant_settings_parse(kvant_settings *s, const char *text, size_t n,
                                  const kvant_error *error)
{
    size_t body = 0;
    KVANT_FORWARD(check_sum(text, n, &body, error));
    uint32_t number = 0;
    for (const char *at = text, *end = text + body; at < end;) {
        const char *stop = memchr(at, '\n', (size_t)(end - at)); /* the body ends with a newline */
        line l = { at, stop, ++number, error };
        KVANT_FORWARD(read_line(s, &l));
        at = stop + 1;
    }
    if (number == 0)
        return kvant_fail(error, KVANT_ERR_FORMAT, "this is not a settings file of kvant");
    return complete(s, error);
}
