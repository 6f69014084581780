# Completion of yunion-mpsctl for fish. The program itself provides the words, including the names of slices and the PIDs of
# clients.

function __yunion_mpsctl_words
    set -l words (commandline --current-process --tokenize --cut-at-cursor) (commandline --current-token --cut-at-cursor)
    yunion-mpsctl complete-words $words 2>/dev/null
end

# After the dashes of run comes another command.
function __yunion_mpsctl_in_command
    contains -- -- (commandline --current-process --tokenize --cut-at-cursor)
end

function __yunion_mpsctl_command
    set -l words (commandline --current-process --tokenize --cut-at-cursor) (commandline --current-token --cut-at-cursor)
    set -l dashes (contains --index -- -- $words)
    set -l rest $words[(math $dashes + 1)..-1]
    complete --do-complete (string join -- ' ' (string escape -- $rest[1..-2]) $rest[-1])
end

complete --command yunion-mpsctl --no-files --keep-order --condition 'not __yunion_mpsctl_in_command' --arguments '(__yunion_mpsctl_words)'
complete --command yunion-mpsctl --no-files --keep-order --condition __yunion_mpsctl_in_command --arguments '(__yunion_mpsctl_command)'
