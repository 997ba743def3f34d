"""Scripts that complete the command line in bash, zsh and fish, made from the option tables."""

import textwrap

import option_tables as tables

STOCK = "f32 f16 bf16 q8_0 q5_1 q5_0 q4_1 q4_0 iq4_nl"
VALUES = {
    "NAME": "quality balanced small tiny",
    "TYPE": STOCK,
    "LEVEL": "auto c avx2 avx2vnni avx512 avx512vnni avx512vbmi neon neondot",
}
TOP = ["--version", "--help", "--cpu"]


def kind_of(option):
    """How the option's value is completed: files, dirs, specs, words, or nothing."""
    if option.value in ("FILE", "PATH"):
        return "files"
    if option.value == "DIR":
        return "dirs"
    if option.value == "SPEC":
        return "specs"
    if option.value in VALUES and option.name != "table":
        return "words"
    return "nothing"


def words_of(option):
    return [f"-{option.letter}", f"--{option.name}"] if option.letter else [f"--{option.name}"]


def brief(text):
    """A help text in one line, without the text in brackets or after a semicolon."""
    return " ".join(text.split()).split(" (")[0].split("; ")[0]


def first_words(read):
    """Commands with their summaries. Commands of two words are under "bench"."""
    found = {}
    for table in read:
        first, _, second = table.name.partition(" ")
        found.setdefault(
            first, "speed and error, compared with rivals" if second else table.summary
        )
    return found


def second_words(read):
    return {table.name.split()[1]: table.summary for table in read if " " in table.name}


# ---- bash ----

BASH = """# bash completion for kvant, made by `kvant completion bash`
_kvant()
{
    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD - 1]} command= words= values= i
    local specs="%(specs)s"
    for ((i = 1; i < COMP_CWORD; i++)); do
        case ${COMP_WORDS[i]} in
        --cpu) ((i++)) ;;
        -*) [[ -z $command ]] || break ;;
        *) command=${command:+$command }${COMP_WORDS[i]}
           [[ $command == bench || $command == help ]] || break ;;
        esac
    done
    # Files complete the words after --, which are the program of exec and its arguments.
    [[ " ${COMP_WORDS[*]:0:COMP_CWORD} " != *" -- "* ]] || return 0
%(values)s
    case $command in
    "") words="%(first)s %(top)s"; [[ $prev == --cpu ]] && words="%(levels)s" ;;
    help) words="%(first)s" ;;
    bench) words="%(second)s" ;;
    completion) words="bash zsh fish" ;;
%(cases)s
    esac
    case $values in
    files) return ;;
    dirs) mapfile -t COMPREPLY < <(compgen -d -- "$cur") ;;
    specs) mapfile -t COMPREPLY < <(compgen -W "$specs" -- "$cur") ;;
    nothing) COMPREPLY=() ;;
    *) mapfile -t COMPREPLY < <(compgen -W "${values:-$words}" -- "$cur") ;;
    esac
}
complete -o default -F _kvant kvant
"""


def bash_kinds(table):
    """How the value of each option is completed, by word; "" for a switch."""
    for option in table.options:
        kind = "" if option.value is None else kind_of(option)
        for word in words_of(option):
            yield word, VALUES[option.value] if kind == "words" else kind


def bash_values(kinds, indent):
    """A case of the shell that says how values of options are completed."""
    by_kind = {}
    for word, kind in kinds:
        by_kind.setdefault(kind, []).append(word)
    lines = [f'{indent}{" | ".join(words)}) values="{kind}" ;;' for kind, words in by_kind.items()]
    return [f"{indent}case $prev in", *lines, f"{indent}esac"] if lines else []


def bash_case(table, usual):
    words = " ".join(word for option in table.options for word in words_of(option)) + " --help"
    special = [(word, kind) for word, kind in bash_kinds(table) if kind != usual[word]]
    lines = [f'    "{table.name}") words="{words}"', *bash_values(special, "        ")]
    return "\n".join(lines) + " ;;"


def bash(read):
    """An option means the same in most commands. A command in which it means something else has a
    separate case."""
    every = {}
    for word, kind in (found for table in read for found in bash_kinds(table)):
        every.setdefault(word, []).append(kind)
    usual = {word: max(kinds, key=kinds.count) for word, kinds in every.items()}
    values = bash_values(((word, kind) for word, kind in usual.items() if kind), "    ")
    return BASH % {
        "specs": " ".join(tables.specs()),
        "first": " ".join(first_words(read)),
        "top": " ".join(TOP),
        "levels": VALUES["LEVEL"],
        "values": "\n".join(values),
        "second": " ".join(second_words(read)),
        "cases": "\n".join(bash_case(table, usual) for table in read if table.options),
    }


# ---- zsh ----

ZSH = """#compdef kvant
# zsh completion for kvant, made by `kvant completion zsh`
local -a specs kvant_commands benchmarks
specs=(%(specs)s)
kvant_commands=(
%(first)s
)
benchmarks=(
%(second)s
)
_kvant_specs() { compadd -a specs }

local curcontext=$curcontext state line
_arguments -C '--cpu[instruction set of kvant]:level:(%(levels)s)' \\
    '(-)--version[version]' '(-)--help[help]' \\
    '1: :->command' '*:: :->rest' && return
if [[ $state == command ]]; then
    _describe command kvant_commands
    return
fi
local command=$words[1]
if [[ $command == bench ]]; then
    if ((CURRENT == 2)); then
        _describe benchmark benchmarks
        return
    fi
    shift words
    ((CURRENT--))
    command="bench $words[1]"
fi
%(shared)s
case $command in
help) _describe command kvant_commands ;;
completion) _values shell bash zsh fish ;;
%(cases)s
esac
"""


def quoted(text):
    return "'" + text.replace("'", "'\\''") + "'"


def zsh_option(option):
    text = brief(option.help)
    for mark in "\\[]:":
        text = text.replace(mark, "\\" + mark)
    action = {
        "files": "_files",
        "dirs": "_directories",
        "specs": "_kvant_specs",
        "nothing": " ",
    }.get(kind_of(option))
    value = (
        ""
        if option.value is None
        else f":{option.value}:{action or '(' + VALUES[option.value] + ')'}"
    )
    return " ".join(quoted(f"*{word}[{text}]{value}") for word in words_of(option))


def zsh_shared(read):
    """Options that several commands have: the name of an array by its words."""
    every = [zsh_option(option) for table in read for option in table.options]
    shared, used = {}, set()
    for option in (option for table in read for option in table.options):
        words, name = zsh_option(option), "o_" + option.name.replace("-", "_")
        if every.count(words) > 1 and words not in shared:
            while name in used:
                name += "_"
            used.add(name)
            shared[words] = name
    return shared


def zsh_case(table, shared):
    rest = " '*:::program:_normal'" if table.name == "exec" else ""
    words = [zsh_option(option) for option in table.options]
    names = " ".join("$" + shared[option] for option in words if option in shared)
    names = textwrap.wrap(names, 96)
    lines = [f"{quoted(table.name)}) _arguments \\", *(f"    {line} \\" for line in names)]
    lines += [f"    {option} \\" for option in words if option not in shared]
    return "\n".join([*lines, f"    '--help[this text]'{rest} ;;"])


def zsh(read):
    shared = zsh_shared(read)

    def described(words):
        return "\n".join("    " + quoted(f"{name}:{text}") for name, text in words.items())

    return ZSH % {
        "specs": " ".join(tables.specs()),
        "first": described(first_words(read)),
        "second": described(second_words(read)),
        "levels": VALUES["LEVEL"],
        "shared": "\n".join(f"local -a {name}=({words})" for words, name in shared.items()),
        "cases": "\n".join(zsh_case(table, shared) for table in read if table.options),
    }


# ---- fish ----


def fish_option(option):
    value = (
        {
            "files": " -rF",
            "dirs": " -xa '(__fish_complete_directories)'",
            "specs": ' -xa "$__kvant_specs"',
            "nothing": " -x",
            "words": f" -xa '{VALUES.get(option.value)}'",
        }[kind_of(option)]
        if option.value is not None
        else ""
    )
    letter = f" -s {option.letter}" if option.letter else ""
    return f"-l {option.name}{letter}{value} -d {quoted(brief(option.help))}"


def fish_options(read):
    """A line for all commands that have the same option. Commands of two words have separate
    lines."""
    found = {}
    for table in read:
        *first, last = table.name.split()
        begin = "".join(f"__fish_seen_subcommand_from {word}; and " for word in first)
        for option in table.options:
            found.setdefault((begin, fish_option(option)), []).append(last)
    line = "complete -c kvant -n '{}__fish_seen_subcommand_from {}' {}"
    return [line.format(begin, " ".join(names), option) for (begin, option), names in found.items()]


def fish(read):
    lines = [
        "# fish completion for kvant, made by `kvant completion fish`",
        f"set -g __kvant_specs {' '.join(tables.specs())}",
        "complete -c kvant -n '__fish_use_subcommand' -f",
        "complete -c kvant -n '__fish_use_subcommand' -l version -d version",
        "complete -c kvant -n '__fish_use_subcommand' -l cpu "
        f"-xa '{VALUES['LEVEL']}' -d {quoted(brief(tables.CPU.help))}",
    ]
    lines += [
        f"complete -c kvant -n '__fish_use_subcommand' -fa {name} -d {quoted(text)}"
        for name, text in first_words(read).items()
    ]
    of_bench = "__fish_seen_subcommand_from bench; and not __fish_seen_subcommand_from " + " ".join(
        second_words(read)
    )
    lines += [
        f"complete -c kvant -n '{of_bench}' -fa {name} -d {quoted(text)}"
        for name, text in second_words(read).items()
    ]
    lines.append(
        "complete -c kvant -n '__fish_seen_subcommand_from completion' -fa 'bash zsh fish'"
    )
    lines.append(
        "complete -c kvant -n '__fish_seen_subcommand_from exec' -xa '(__fish_complete_subcommand)'"
    )
    lines += fish_options(read)
    return "\n".join(lines) + "\n"
