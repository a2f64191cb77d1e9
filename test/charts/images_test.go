package charts

import (
	"debug/buildinfo"
	"debug/elf"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"go.yaml.in/yaml/v3"
)

// The programs that images are of; relay is a mode of kvtracker.
var programs = []string{"ingress", "router", "kvtracker", "limiter", "classifier", "accounting"}

// There is no container engine where this runs. What an image holds is built by
// the command in the Dockerfile, is static, and knows every flag and variable that
// the charts give it.
func TestImages(t *testing.T) {
	bin := programsOf(t)
	for _, name := range programs {
		info, err := buildinfo.ReadFile(filepath.Join(bin, name))
		if err != nil {
			t.Fatal(err)
		}
		var settings []string
		for _, s := range info.Settings {
			settings = append(settings, s.Key+"="+s.Value)
		}
		for _, want := range []string{"CGO_ENABLED=0", "-trimpath=true"} {
			if !slices.Contains(settings, want) {
				t.Errorf("%s: not built with %s: %v", name, want, settings)
			}
		}
		file, err := elf.Open(filepath.Join(bin, name))
		if err != nil {
			t.Fatal(err)
		}
		if libs, err := file.ImportedLibraries(); err != nil || len(libs) > 0 {
			t.Errorf("%s needs %v (%v), want a static program", name, libs, err)
		}
		if err := file.Close(); err != nil {
			t.Error(err)
		}
	}

	h := newHelm(t)
	all := map[string][]string{"everything": everything}
	for name, args := range variants {
		all[name] = args
	}
	for variant, args := range all {
		for service, w := range workloads(t, h.render(t, args...)) {
			if service == "nats" || service == "redis" {
				continue
			}
			c := theContainer(t, w)
			program := filepath.Join(bin, strings.Split(filepath.Base(c.Image), ":")[0])
			// All flags are read before help is asked for.
			usage, err := exec.CommandContext(t.Context(), program, append(c.Args, "-h")...).CombinedOutput()
			if err != nil {
				t.Errorf("%s, %s %v: %v\n%.300s", variant, service, c.Args, err, usage)
			}
			prefix := "KINFERENCE_" + strings.ToUpper(filepath.Base(program)) + "_"
			for _, env := range c.Env {
				flagName, ours := strings.CutPrefix(env.Name, prefix)
				flagName = strings.ReplaceAll(strings.ToLower(flagName), "_", "-")
				if ours && flagName != "redis-password" && !strings.Contains(string(usage), "\n  -"+flagName+" ") {
					t.Errorf("%s, %s: no flag is set by %s", variant, service, env.Name)
				}
				if !ours && strings.HasPrefix(env.Name, "KINFERENCE_") {
					t.Errorf("%s, %s: %s is not a variable of %s", variant, service, env.Name, program)
				}
			}
		}
	}
}

type container struct {
	Image string
	Args  []string
	Env   []struct{ Name, Value string }
}

func theContainer(t *testing.T, o object) container {
	t.Helper()
	var list []container
	text, err := yaml.Marshal(o.Spec.Template.Spec["containers"])
	if err == nil {
		err = yaml.Unmarshal(text, &list)
	}
	if err != nil || len(list) != 1 {
		t.Fatalf("%s: %v, %d containers", o.Metadata.Name, err, len(list))
	}
	return list[0]
}

var command = regexp.MustCompile(`(?m)^\s+(go build .*) -o /out/service `)

// scratch is where built puts them.
var scratch string

// built are the programs, built once as the Dockerfile does.
var built = sync.OnceValues(func() (string, error) {
	raw, err := os.ReadFile(top + "/deploy/Dockerfile")
	if err != nil {
		return "", err
	}
	line := command.FindStringSubmatch(string(raw))
	if line == nil || !strings.Contains(string(raw), "CGO_ENABLED=0 GOOS=$TARGETOS GOARCH=$TARGETARCH") {
		return "", errors.New("the Dockerfile has not the go build that this test looks for")
	}
	bin, err := os.MkdirTemp("", "kinference-images-")
	if err != nil {
		return "", err
	}
	scratch = bin
	shell := line[1] + " -o " + bin
	for _, name := range programs {
		shell += " ./services/" + name + "/cmd/" + name
	}
	cmd := exec.Command("sh", "-c", shell)
	cmd.Dir, cmd.Env = top, append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return bin, fmt.Errorf("%s: %w\n%s", shell, err, out)
	}
	return bin, nil
})

// programsOf is the folder with the programs.
func programsOf(t *testing.T) string {
	t.Helper()
	bin, err := built()
	if err != nil {
		t.Fatal(err)
	}
	return bin
}

func TestMain(m *testing.M) {
	code := m.Run()
	if scratch != "" {
		_ = os.RemoveAll(scratch) // a folder for scratch files
	}
	os.Exit(code)
}
