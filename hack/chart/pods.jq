# Pods for the admission policies (hack/chart.sh): a list of {pod, refused}; `refused` is a part of the message, or null if
# the pod is to be accepted.

def rules: "restart-rules.reprise.dev";
def options: "restart-options.reprise.dev";
def request: "restart-request.reprise.dev";
def policy: "failure-policy.reprise.dev";
def rule: "{action: RestartAllContainers, exitCodes: {operator: In, values: [42]}}";
def listed(n): [range(n)] | map(tostring) | join(", ");

def pod(name; namespace; annotations): {
  apiVersion: "v1", kind: "Pod",
  metadata: {name: name, namespace: namespace, annotations: annotations},
  spec: {
    initContainers: [{name: "fetch", image: "none"}],
    containers: [{name: "trainer", image: "none"}, {name: "operator", image: "none"}],
    tolerations: [{operator: "Exists"}]
  }
};
def good(name; annotations): {pod: pod(name; "reprise-check-labelled"; annotations), refused: null};
def bad(name; annotations; refused): {pod: pod(name; "reprise-check-labelled"; annotations), refused: refused};
def bad_rules(name; text; refused): bad(name; {(rules): text}; refused);

[
  # Where they may.
  good("labelled"; {(rules): "[\(rule)]"}),
  {pod: pod("named"; "reprise-check-named"; {(rules): "[\(rule)]"}), refused: null},
  {pod: pod("none-at-all"; "reprise-check-other"; {"example.com/enreprise.dev": "x", "enreprise.dev/x": "y"}), refused: null},
  {pod: pod("elsewhere"; "reprise-check-other"; {(rules): "[\(rule)]"}), refused: "namespace reprise-check-other may not use annotations of reprise.dev"},
  {pod: pod("elsewhere-policy"; "reprise-check-other"; {(policy): "{action: DeletePod}"}), refused: "may not use annotations of reprise.dev"},

  # All that the README and the KEPs write.
  good("of-a-container"; {"\(rules)/container.trainer": "[\(rule)]\n", "\(rules)/container.fetch": "[]"}),
  good("block"; {(rules): "# what asks for a restart\n- action: RestartPod # with grace {\n  exitCodes:\n    operator: NotIn\n    values:\n    - 0\n    - 143\n"}),
  good("json"; {"\(rules)/pod": ([{action: "Restart", onExit: {exitCodes: {operator: "In", values: [1, -1, 255]}}}] | tojson)}),
  good("json-lines"; {"\(rules)/pod": ([{action: "Restart", when: {exitCodes: {operator: "NotIn", values: []}}}] | tojson | gsub(","; ",\n  "))}),
  good("quoted"; {(rules): "[{\"action\": 'RestartPod', 'exitCodes': {operator: \"In\", values: [0x2a, 43, ]}}]"}),
  good("mapping"; {"\(rules)/pod": "trainer:\n- \(rule)\noperator: [\(rule)]\nfetch: []\n"}),
  good("mapping-json"; {"\(rules)/pod": ({operator: [{action: "Restart", exitCodes: {operator: "In", values: [1]}}]} | tojson)}),
  good("document"; {(rules): "---\n[\(rule)]\n"}),
  good("most-rules"; {(rules): "[\([range(20)] | map(rule) | join(", "))]"}),
  good("most-values"; {(rules): "[{action: Restart, exitCodes: {operator: In, values: [\(listed(255))]}}]"}),
  good("full"; {(rules): "[\([range(20)] | map("{action: Restart, exitCodes: {operator: In, values: [\(listed(255))]}}") | join(", "))]"}),
  good("oom"; {(rules): "[{action: Restart, onOOMKilled: {}}, {action: RestartPod, onSignal: [SIGSEGV, 'SIGBUS', \"SIGSYS\", ]}]"}),
  good("oom-json"; {(rules): ([{action: "RestartAllContainers", onOOMKilled: {}, onSignal: ["SIGABRT"], exitCodes: {operator: "In", values: [42]}}] | tojson)}),
  good("oom-block"; {"\(rules)/pod": "trainer:\n- action: Restart\n  onSignal: # of its child\n  - SIGSEGV\n  onOOMKilled:\n    {}\n"}),
  good("most-signals"; {(rules): "[{action: Restart, onSignal: [\([range(64)] | map("SIGVTALRM") | join(", "))]}]"}),
  good("options"; {(options): "{start: Kubelet, gracePeriodSeconds: 3, completedContainers: Keep}", "\(options)/pod": "start: \"Replay\"\n"}),
  good("options-json"; {(options): ({start: "Auto", gracePeriodSeconds: 0, completedContainers: "Restart"} | tojson), (rules): "[]"}),
  good("options-day"; {(options): "{gracePeriodSeconds: 86400, backOff: {firstSeconds: 0, maxSeconds: 86399, resetSeconds: 86400}}"}),
  good("back-off-json"; {(options): ({backOff: {firstSeconds: 10}, start: "Auto"} | tojson)}),
  good("back-off-block"; {(options): "backOff:\n  firstSeconds: 1 # at once\n  maxSeconds: 60\nstart: Auto\n"}),
  good("back-off-hex"; {(options): "backOff: {maxSeconds: 0x7f}"}),
  good("back-off-empty"; {(options): "{backOff: {}}"}),
  good("no-options"; {(options): "{}"}),
  good("policy"; {(policy): "{action: DeletePod, maxRestartsOnNode: 7}", "\(policy)/pod": "action: None"}),
  good("request"; {"\(request)/pod": "2026-11-26T10:53:26.123Z-abza!", (request): "one, of two"}),
  good("policy-json"; {(policy): ({action: "DeletePod", maxRestartsOnNode: 7} | tojson)}),

  # Keys.
  bad("unknown-key"; {"restart-rule.reprise.dev": "[]"}; "unknown annotation restart-rule.reprise.dev: known are"),
  bad("domain-alone"; {"reprise.dev/restart-rules": "[]"}; "unknown annotation reprise.dev/restart-rules"),
  bad("unknown-place"; {"\(rules)/trainer": "[]"}; "unknown annotation restart-rules.reprise.dev/trainer"),
  bad("options-of-a-container"; {"\(options)/container.trainer": "{}"}; "unknown annotation"),
  bad("policy-of-a-container"; {"\(policy)/container.trainer": "{action: None}"}; "unknown annotation"),
  bad("request-of-a-container"; {"\(request)/container.trainer": "1"}; "unknown annotation"),
  bad("request-empty"; {(request): ""}; "has 1 to 128 bytes"),
  bad("request-long"; {"\(request)/pod": ("x" * 129)}; "has 1 to 128 bytes"),
  bad("request-of-two-lines"; {"\(request)/pod": "a\nb"}; "no control characters"),
  bad("stranger"; {"\(rules)/container.trainr": "[\(rule)]"}; "container.trainr: the pod has no such container, only trainer, operator, fetch"),
  bad("stranger-in-a-mapping"; {"\(rules)/pod": "trainr: [\(rule)]"}; "unknown field"),

  # Lengths.
  bad("long"; {(rules): ("[]" + " " * 65535)}; "together may have 64 KiB"),
  bad("long-together"; {(rules): ("[]" + " " * 40000), (options): ("{}" + " " * 30000)}; "together may have 64 KiB"),
  bad("long-in-bytes"; {(rules): ("[] #" + "é" * 33000)}; "together may have 64 KiB"),
  bad("longest"; {(rules): ("[" + "{action: x}," * 21000 + "]")}; "reprise-annotations"),
  bad("long-policy"; {(policy): ("action: None" + " " * 1020)}; "failure-policy.reprise.dev: longer than 1024 bytes"),
  bad("rules-21"; {(rules): "[\([range(21)] | map(rule) | join(", "))]"}; "at most 20 rules"),
  bad("values-256"; {(rules): "[{action: Restart, exitCodes: {operator: In, values: [\(listed(256))]}}]"}; "255 values"),

  bad("many"; [range(5000)] | map({key: "\(rules)/container.c\(.)", value: ""}) | from_entries; "more than 200 annotations"),
  # Left to the plugin: to look at it would cost the API server too much.
  good("lines-with-comments"; {(rules): ("#\n" * 501 + "[\(rule), {")}),
  good("lines"; {(rules): ("[\(rule)]" + "\n" * 65000)}),

  # Text that is no list of rules.
  bad_rules("empty"; ""; "restart-rules.reprise.dev: malformed"),
  bad_rules("comment-alone"; "# [\(rule)]"; "malformed"),
  bad_rules("mapping-without-pod"; "trainer: [\(rule)]"; "malformed"),
  bad_rules("word"; "RestartAllContainers"; "malformed"),
  bad_rules("unclosed"; "[\(rule)"; "malformed"),
  bad_rules("unclosed-brace"; "[{action: Restart, exitCodes: {operator: In, values: [42]}]"; "malformed"),
  bad_rules("anchor"; "[&a \(rule), *a]"; "malformed"),
  bad("word-for-all"; {"\(rules)/pod": "42"}; "malformed"),
  bad("list-of-options"; {(options): "[start]"}; "malformed"),
  bad("policy-word"; {(policy): "DeletePod"}; "malformed"),

  # Fields and words.
  bad_rules("field"; "[{action: Restart, exitcodes: {operator: In, values: [42]}}]"; "restart-rules.reprise.dev: unknown field"),
  bad_rules("quoted-field"; "[{\"acton\": \"Restart\"}]"; "unknown field"),
  bad_rules("action"; "[{action: RestartAll, exitCodes: {operator: In, values: [42]}}]"; "unknown value"),
  bad_rules("action-in-a-block"; "- action: Ignore\n  exitCodes: {operator: In, values: [42]}\n"; "unknown value"),
  bad_rules("operator"; "[{action: Restart, exitCodes: {operator: in, values: [42]}}]"; "unknown value"),
  bad_rules("no-code"; "[{action: Restart, exitCodes: {operator: In, values: [42, SIGTERM]}}]"; "values are whole numbers"),
  bad_rules("quoted-code"; "[{action: Restart, exitCodes: {operator: In, values: ['42']}}]"; "values are whole numbers"),
  bad_rules("oom-word"; "[{action: Restart, onOOMKilled: true}]"; "onOOMKilled is {}"),
  bad_rules("oom-nothing"; "- onOOMKilled:\n  action: Restart\n"; "onOOMKilled is {}"),
  bad_rules("oom-field"; "[{action: Restart, onOOMKilled: {values: [1]}}]"; "onOOMKilled is {}"),
  bad_rules("oom-misspelt"; "[{action: Restart, onOomKilled: {}}]"; "unknown field"),
  bad_rules("signal-word"; "[{action: Restart, onSignal: SIGSEGV}]"; "onSignal a list"),
  bad_rules("signal-number"; "[{action: Restart, onSignal: [SIGSEGV, 11]}]"; "onSignal a list"),
  bad_rules("signal-lower"; "[{action: Restart, onSignal: [sigsegv]}]"; "onSignal a list"),
  bad_rules("signal-short"; "[{action: Restart, onSignal: [SEGV]}]"; "onSignal a list"),
  bad_rules("signal-unknown"; "[{action: Restart, onSignal: [SIGRTMIN]}]"; "onSignal a list"),
  bad_rules("signal-none"; "[{action: Restart, onSignal: []}]"; "onSignal a list"),
  bad_rules("signal-mapping"; "[{action: Restart, onSignal: {values: [1]}}]"; "onSignal a list"),
  bad_rules("signals-65"; "[{action: Restart, onSignal: [\([range(65)] | map("SIGHUP") | join(", "))]}]"; "onSignal a list"),
  bad("option"; {(options): "{start: Kubelet, grace: 3}"}; "unknown field"),
  bad("start"; {(options): "{start: auto}"}; "unknown value"),
  bad("grace"; {(options): "{gracePeriodSeconds: 3s, start: Auto}"}; "unknown value"),
  bad("negative-grace"; {(options): "gracePeriodSeconds: -1"}; "unknown value"),
  bad("long-grace"; {(options): "gracePeriodSeconds: 86401"}; "unknown value"),
  bad("longer-grace"; {(options): "{gracePeriodSeconds: 999999999999999999999}"}; "unknown value"),
  bad("back-off-word"; {(options): "backOff: 10s"}; "unknown value"),
  bad("back-off-number"; {(options): "{backOff: 10}"}; "unknown value"),
  bad("back-off-field"; {(options): "{backOff: {initialSeconds: 10}}"}; "unknown field"),
  bad("back-off-unit"; {(options): "{backOff: {firstSeconds: 10s}}"}; "unknown value"),
  bad("back-off-fraction"; {(options): "{backOff: {firstSeconds: 0.5}}"}; "unknown value"),
  bad("back-off-negative"; {(options): "backOff:\n  resetSeconds: -1\n"}; "unknown value"),
  bad("back-off-long"; {(options): "{backOff: {firstSeconds: 1, maxSeconds: 86401}}"}; "unknown value"),
  bad("completed"; {(options): "completedContainers: Ignore"}; "unknown value"),
  bad("policy-without-action"; {(policy): "{maxRestartsOnNode: 7}"}; "unknown value"),
  bad("policy-action"; {(policy): "{action: Delete}"}; "unknown value"),
  bad("policy-restarts"; {(policy): "{action: DeletePod, maxRestartsOnNode: 0}"}; "unknown value"),
  bad("policy-field"; {(policy): "{action: DeletePod, maxRestarts: 7}"}; "unknown field")
]
