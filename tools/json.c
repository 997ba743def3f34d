/* json.c - see json.h. */
#include "json.h"

#include <math.h>
#include <stdbool.h>
#include <stdlib.h>

/* The bytes of the UTF-8 character at `text`; 0: there is none. Each byte is looked at only if the
 * byte before it is not the end of the text. */
static int utf8_bytes(const char *text)
{
    const unsigned char *at = (const unsigned char *)text;
    const int n = at[0] < 0x80   ? 1
                  : at[0] < 0xc2 ? 0
                  : at[0] < 0xe0 ? 2
                  : at[0] < 0xf0 ? 3
                  : at[0] < 0xf5 ? 4
                                 : 0;
    for (int i = 1; i < n; i++)
        if ((at[i] & 0xc0) != 0x80)
            return 0;
    const bool is_short = (at[0] == 0xe0 && at[1] < 0xa0) || (at[0] == 0xf0 && at[1] < 0x90),
               is_surrogate = at[0] == 0xed && at[1] > 0x9f,
               is_beyond = at[0] == 0xf4 && at[1] > 0x8f;
    return is_short || is_surrogate || is_beyond ? 0 : n;
}

void json_string(FILE *out, const char *text)
{
    if (text == NULL) {
        fputs("null", out);
        return;
    }
    putc('"', out);
    for (int n; *text != 0; text += n > 0 ? n : 1) {
        n = utf8_bytes(text);
        if (*text == '"' || *text == '\\')
            fprintf(out, "\\%c", *text);
        else if (n == 0 || (unsigned char)*text < 0x20 || *text == 0x7f)
            fprintf(out, "\\u%04x", (n == 0 ? 0xdc00u : 0) + (unsigned char)*text);
        else if (n == 2 && (unsigned char)text[0] == 0xc2 && (unsigned char)text[1] < 0xa0)
            fprintf(out, "\\u%04x", (unsigned)(unsigned char)text[1]); /* a control character */
        else
            fwrite(text, 1, (size_t)n, out);
    }
    putc('"', out);
}

void json_member(FILE *out, const char *before, const char *key, const char *text)
{
    fprintf(out, "%s\"%s\": ", before, key);
    json_string(out, text);
}

void json_number(FILE *out, double number)
{
    char text[32];
    if (!isfinite(number)) {
        fputs("null", out);
        return;
    }
    snprintf(text, sizeof text, "%.15g", number);
    if (strtod(text, NULL) != number)
        snprintf(text, sizeof text, "%.17g", number);
    fputs(text, out);
}
