/* json.c - see json.h. */
#include "json.h"

#include <math.h>
#include <stdlib.h>

void json_string(FILE *out, const char *text)
{
    if (text == NULL) {
        fputs("null", out);
        return;
    }
    putc('"', out);
    for (; *text != 0; text++)
        if (*text == '"' || *text == '\\')
            fprintf(out, "\\%c", *text);
        else if ((unsigned char)*text < 0x20)
            fprintf(out, "\\u%04x", (unsigned)*text);
        else
            putc(*text, out);
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
