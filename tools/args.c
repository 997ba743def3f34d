/* args.c - option tables on top of getopt_long: help texts, the tables as JSON, numbers,
 * suggestions. */
#include "args.h"

#include "command.h"
#include "json.h"

#include <ctype.h>
#include <errno.h>
#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_OPTIONS 32
#define LONG_BASE 1000 /* getopt values: letters as they are, long-only options from here on */
#define VALUE_HELP 999
#define HELP_COLUMN 26

/* Whether two texts have the same first n letters, or end before as the same, whatever the case. */
static bool same_letters(const char *a, const char *b, size_t n)
{
    size_t i = 0;
    while (i < n && a[i] != 0 && tolower((unsigned char)a[i]) == tolower((unsigned char)b[i]))
        i++;
    return i == n || a[i] == b[i];
}

static int option_code(const arg_spec *spec, size_t i)
{
    return spec->options[i].letter != 0 ? spec->options[i].letter : LONG_BASE + (int)i;
}

static const arg_option *find_code(const arg_spec *spec, int code)
{
    for (size_t i = 0; i < spec->n_options; i++)
        if (option_code(spec, i) == code)
            return &spec->options[i];
    return NULL;
}

static void print_option(char letter, const char *name, const char *value, const char *help)
{
    char left[80];
    int used = letter != 0 ? snprintf(left, sizeof left, "  -%c, --%s", letter, name)
                           : snprintf(left, sizeof left, "      --%s", name);
    if (value != NULL && used > 0 && (size_t)used < sizeof left)
        used += snprintf(left + used, sizeof left - (size_t)used, " %s", value);
    printf("%-*s", HELP_COLUMN, left);
    if (used >= HELP_COLUMN)
        printf("\n%*s", HELP_COLUMN, "");
    for (const char *p = help; *p != 0; p++) {
        putchar(*p);
        if (*p == '\n')
            printf("%*s", HELP_COLUMN, "");
    }
    putchar('\n');
}

static int print_help(const arg_spec *spec)
{
    printf("usage: kvant %s %s\n\n%s\n\noptions:\n", spec->command, spec->usage, spec->about);
    for (size_t i = 0; i < spec->n_options; i++) {
        const arg_option *o = &spec->options[i];
        print_option(o->letter, o->name, o->value, o->help);
    }
    print_option('h', "help", NULL, "this text");
    if (spec->notes != NULL)
        printf("\n%s\n", spec->notes);
    return finish_output();
}

/* --describe: the table for programs. */
static int print_description(const arg_spec *spec)
{
    json_member(stdout, "{", "command", spec->command);
    json_member(stdout, ", ", "usage", spec->usage);
    json_member(stdout, ", ", "about", spec->about);
    json_member(stdout, ", ", "notes", spec->notes);
    fputs(", \"options\": [", stdout);
    for (size_t i = 0; i < spec->n_options; i++) {
        const arg_option *o = &spec->options[i];
        const char letter[] = { o->letter, 0 };
        json_member(stdout, i > 0 ? ",\n {" : "\n {", "letter", o->letter != 0 ? letter : NULL);
        json_member(stdout, ", ", "name", o->name);
        json_member(stdout, ", ", "value", o->value);
        json_member(stdout, ", ", "help", o->help);
        putchar('}');
    }
    puts("]}");
    return finish_output();
}

static void build_tables(const arg_spec *spec, char *letters, struct option *longs)
{
    size_t n = 0;
    *letters++ =
        '+'; /* stop at the first word: what follows belongs to the program that exec starts */
    *letters++ = ':';
    for (size_t i = 0; i < spec->n_options; i++) {
        const arg_option *o = &spec->options[i];
        const int has_value = o->value != NULL ? required_argument : no_argument;
        longs[n++] = (struct option){ o->name, has_value, NULL, option_code(spec, i) };
        if (o->letter == 0)
            continue;
        *letters++ = o->letter;
        if (o->value != NULL)
            *letters++ = ':';
    }
    *letters++ = 'h';
    *letters = 0;
    longs[n++] = (struct option){ "help", no_argument, NULL, VALUE_HELP };
    longs[n] = (struct option){ NULL, 0, NULL, 0 };
}

static int usage_error(const arg_spec *spec)
{
    hint("kvant %s --help lists the options", spec->command);
    return EXIT_USAGE;
}

/* Optimal string alignment: a swap of neighbours counts once, because that is how fingers slip. */
static size_t edit_distance(const char *a, const char *b)
{
    enum { MAX = 31 };
    const size_t na = strlen(a), nb = strlen(b);
    size_t d[MAX + 1][MAX + 1];
    if (na > MAX || nb > MAX)
        return MAX;
    for (size_t i = 0; i <= na; i++)
        d[i][0] = i;
    for (size_t j = 0; j <= nb; j++)
        d[0][j] = j;
    for (size_t i = 1; i <= na; i++) {
        for (size_t j = 1; j <= nb; j++) {
            size_t best = d[i - 1][j - 1] +
                          (tolower((unsigned char)a[i - 1]) != tolower((unsigned char)b[j - 1]));
            if (d[i - 1][j] + 1 < best)
                best = d[i - 1][j] + 1;
            if (d[i][j - 1] + 1 < best)
                best = d[i][j - 1] + 1;
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] &&
                d[i - 2][j - 2] + 1 < best)
                best = d[i - 2][j - 2] + 1;
            d[i][j] = best;
        }
    }
    return d[na][nb];
}

/* Whether the longer string begins with the shorter string. A single letter is too short to
 * tell. */
static bool one_begins_the_other(const char *a, const char *b)
{
    const size_t na = strlen(a), nb = strlen(b), n = na < nb ? na : nb;
    return n > 1 && same_letters(a, b, n);
}

const char *args_closest(const char *word, const char *const *names, size_t n)
{
    const char *closest = NULL;
    size_t best = strlen(word) / 2 + 1; /* beyond half of the word a suggestion is a guess */
    for (size_t i = 0; i < n; i++) {
        if (one_begins_the_other(word, names[i]))
            return names[i];
        const size_t distance = edit_distance(word, names[i]);
        if (distance < best) {
            best = distance;
            closest = names[i];
        }
    }
    return closest;
}

/* Explains why getopt_long refused an option: the name does not exist, it is the beginning of
 * several names, or a switch was given a value. */
static int refused_long(const arg_spec *spec, const char *word)
{
    const char *names[MAX_OPTIONS], *begun[MAX_OPTIONS] = { NULL };
    const size_t length = strcspn(word, "=");
    char name[64];
    size_t n_begun = 0;
    snprintf(name, sizeof name, "%.*s", (int)length, word);
    for (size_t i = 0; i < spec->n_options; i++) {
        names[i] = spec->options[i].name;
        if (strncmp(names[i], name, strlen(name)) == 0)
            begun[n_begun++] = names[i];
    }
    if (n_begun == 1) {
        complain("%s: --%s takes no value", spec->command, begun[0]);
    } else if (n_begun > 1) {
        complain("%s: --%s is ambiguous: it may be --%s or --%s", spec->command, name, begun[0],
                 begun[1]);
    } else {
        const char *closest = args_closest(name, names, spec->n_options);
        complain("%s: unknown option --%s", spec->command, name);
        if (closest != NULL)
            hint("did you mean --%s?", closest);
    }
    return usage_error(spec);
}

static int refused_option(const arg_spec *spec, char **argv)
{
    if (optopt == 0 || optopt >= VALUE_HELP) /* how getopt_long reports a long option */
        return refused_long(spec, argv[optind - 1] + 2);
    complain("%s: unknown option -%c", spec->command, optopt);
    return usage_error(spec);
}

static bool take_double(const char *option, const char *text, double min, double max, double *value)
{
    char *end = NULL;
    errno = 0;
    const double x = strtod(text, &end);
    if (errno == 0 && end != text && *end == 0 && isfinite(x) && x >= min && x <= max) {
        *value = x;
        return true;
    }
    return complain("%s: '%s' is not a number from %g to %g", option, text, min, max);
}

static bool take_value(const arg_option *o, void *settings, const char *value)
{
    char name[32], *part = (char *)settings + o->at;
    snprintf(name, sizeof name, "--%s", o->name);
    switch (o->kind) {
    case ARG_IS_SWITCH: return *(bool *)part = true;
    case ARG_IS_TEXT: *(const char **)(void *)part = value; return true;
    case ARG_IS_U32:
        return args_u32(name, value, (uint32_t)o->min, (uint32_t)o->max, (uint32_t *)(void *)part);
    case ARG_IS_DOUBLE: return take_double(name, value, o->min, o->max, (double *)(void *)part);
    default: return o->take(part, value);
    }
}

int args_parse(const arg_spec *spec, int argc, char **argv, void *settings, int *rest)
{
    char letters[2 * MAX_OPTIONS + 4];
    struct option longs[MAX_OPTIONS + 2];
    if (spec->n_options > MAX_OPTIONS)
        return EXIT_RUNTIME;
    if (argc == 2 && strcmp(argv[1], "--describe") == 0)
        return print_description(spec);
    build_tables(spec, letters, longs);
    opterr = 0;
    optind = 1;
    for (;;) {
        const int code = getopt_long(argc, argv, letters, longs, NULL);
        if (code == -1)
            break;
        if (code == 'h' || code == VALUE_HELP)
            return print_help(spec);
        if (code == ':') {
            complain("%s: %s needs a value", spec->command, argv[optind - 1]);
            return usage_error(spec);
        }
        const arg_option *o = find_code(spec, code);
        if (o == NULL)
            return refused_option(spec, argv);
        if (!take_value(o, settings, optarg))
            return usage_error(spec);
    }
    *rest = optind;
    return -1;
}

int args_parse_all(const arg_spec *spec, int argc, char **argv, void *settings)
{
    int rest = 0;
    const int code = args_parse(spec, argc, argv, settings, &rest);
    if (code >= 0 || rest == argc)
        return code;
    complain("%s: unexpected word '%s'", spec->command, argv[rest]);
    return usage_error(spec);
}

bool args_u32(const char *option, const char *text, uint32_t min, uint32_t max, uint32_t *value)
{
    char *end = NULL;
    errno = 0;
    const long long n = strtoll(text, &end, 10);
    if (errno == 0 && end != text && *end == 0 && n >= (long long)min && n <= (long long)max) {
        *value = (uint32_t)n;
        return true;
    }
    return complain("%s: '%s' is not a whole number from %lu to %lu", option, text,
                    (unsigned long)min, (unsigned long)max);
}

bool args_list(const char *option, const char *text, bool (*take)(void *user, char *word),
               void *user)
{
    char word[32];
    for (const char *p = text;; p++) {
        const size_t length = strcspn(p, ",");
        if (length >= sizeof word)
            return complain("%s: '%s' is not a list of words with commas between them", option,
                            text);
        memcpy(word, p, length);
        word[length] = 0;
        if (!take(user, word))
            return false;
        p += length;
        if (*p == 0)
            return true;
    }
}

static int ascending(const void *a, const void *b)
{
    const uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

bool args_u32_list(const char *option, const char *text, uint32_t min, uint32_t max,
                   uint32_t *values, size_t room, size_t *n)
{
    char word[32];
    *n = 0;
    for (const char *p = text;; p++) {
        const size_t length = strcspn(p, ",");
        snprintf(word, sizeof word, "%.*s", (int)length, p);
        if (*n == room)
            return complain("%s: the list has more than %zu numbers", option, room);
        if (!args_u32(option, word, min, max, &values[(*n)++]))
            return false;
        p += length;
        if (*p == 0)
            break;
    }
    qsort(values, *n, sizeof *values, ascending);
    size_t kept = 1;
    for (size_t i = 1; i < *n; i++)
        if (values[i] != values[kept - 1])
            values[kept++] = values[i];
    *n = kept;
    return true;
}

int args_unknown_word(const char *what, const char *word, const char *const *names, size_t n,
                      const char *help)
{
    complain("unknown %s '%s'", what, word);
    const char *closest = args_closest(word, names, n);
    if (closest != NULL)
        hint("did you mean '%s'?", closest);
    hint("%s", help);
    return EXIT_USAGE;
}
