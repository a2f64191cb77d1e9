package console

import (
	"bufio"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/coder/websocket"
)

// browser is one page of a real Chromium, driven by the DevTools protocol
// (https://chromedevtools.github.io/devtools-protocol, as of Chromium 156). The few
// calls that a test needs are less than a library for all of them.
type browser struct {
	t       *testing.T
	conn    *websocket.Conn
	session string

	mu      sync.Mutex
	next    int
	waiting map[int]chan reply
	said    []string // what the page's console and its exceptions said
}

type reply struct {
	Result json.RawMessage
	Error  *struct{ Message string }
}

// chromium is the program; the test is skipped where there is none, unless
// KINFERENCE_INTEROP=1 says that there must be.
func chromium(t *testing.T) string {
	for _, name := range []string{"chromium", "chromium-browser", "google-chrome"} {
		if path, err := exec.LookPath(name); err == nil {
			return path
		}
	}
	if os.Getenv("KINFERENCE_INTEROP") == "1" {
		t.Fatal("there is no Chromium: scripts/deps.sh installs it")
	}
	t.Skip("NOT TESTED: there is no Chromium (apt-get install chromium)")
	return ""
}

// open starts Chromium and opens an empty page.
func open(t *testing.T) *browser {
	t.Helper()
	cmd := exec.Command(chromium(t), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic", "--no-first-run", "--disable-background-networking",
		"--disable-component-update", "--disable-sync", "--disable-extensions", "--hide-scrollbars", "--window-size=1360,900", "--remote-debugging-port=0",
		"--user-data-dir="+filepath.Join(t.TempDir(), "profile"), "about:blank")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	stderr, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	read := make(chan struct{})
	t.Cleanup(func() {
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) // it may have ended
		<-read
		_ = cmd.Wait()
	})
	address := make(chan string, 1)
	go func() {
		defer close(read)
		found := regexp.MustCompile(`DevTools listening on (ws://\S+)`)
		lines := bufio.NewScanner(stderr)
		for lines.Scan() {
			if m := found.FindStringSubmatch(lines.Text()); m != nil {
				address <- m[1]
			}
		}
		_, _ = io.Copy(io.Discard, stderr)
	}()
	b := &browser{t: t, waiting: map[int]chan reply{}}
	select {
	case url := <-address:
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if b.conn, _, err = websocket.Dial(ctx, url, nil); err != nil {
			t.Fatalf("reach Chromium: %v", err)
		}
	case <-time.After(2 * time.Minute):
		t.Fatal("Chromium did not start")
	}
	b.conn.SetReadLimit(64 << 20)
	done := make(chan struct{})
	go func() { defer close(done); b.read() }()
	t.Cleanup(func() { _ = b.conn.CloseNow(); <-done })

	var target struct{ TargetID string }
	b.call("Target.createTarget", map[string]any{"url": "about:blank"}, &target)
	var attached struct{ SessionID string }
	b.call("Target.attachToTarget", map[string]any{"targetId": target.TargetID, "flatten": true}, &attached)
	b.session = attached.SessionID
	b.call("Runtime.enable", nil, nil)
	b.call("Log.enable", nil, nil)
	b.call("Page.enable", nil, nil)
	return b
}

func (b *browser) read() {
	for {
		_, raw, err := b.conn.Read(context.Background())
		if err != nil {
			b.mu.Lock()
			for _, c := range b.waiting {
				close(c)
			}
			b.waiting = nil
			b.mu.Unlock()
			return
		}
		var m struct {
			ID     int
			Method string
			Params json.RawMessage
			reply
		}
		if err := json.Unmarshal(raw, &m); err != nil {
			continue
		}
		b.mu.Lock()
		switch c := b.waiting[m.ID]; {
		case m.ID != 0 && c != nil:
			delete(b.waiting, m.ID)
			c <- m.reply
		case m.Method == "Runtime.exceptionThrown" || m.Method == "Log.entryAdded":
			b.said = append(b.said, string(m.Params))
		}
		b.mu.Unlock()
	}
}

// call makes one call and decodes its result.
func (b *browser) call(method string, params map[string]any, result any) {
	b.t.Helper()
	if err := b.try(method, params, result); err != nil {
		b.t.Fatalf("%s: %v", method, err)
	}
}

func (b *browser) try(method string, params map[string]any, result any) error {
	answer := make(chan reply, 1)
	b.mu.Lock()
	if b.waiting == nil {
		b.mu.Unlock()
		return errors.New("Chromium is gone")
	}
	b.next++
	m := map[string]any{"id": b.next, "method": method, "params": params}
	if params == nil {
		m["params"] = map[string]any{}
	}
	if b.session != "" {
		m["sessionId"] = b.session
	}
	b.waiting[b.next] = answer
	b.mu.Unlock()
	raw, err := json.Marshal(m)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := b.conn.Write(ctx, websocket.MessageText, raw); err != nil {
		return err
	}
	select {
	case r, ok := <-answer:
		if !ok {
			return errors.New("Chromium is gone")
		}
		if r.Error != nil {
			return errors.New(r.Error.Message)
		}
		if result != nil {
			return json.Unmarshal(r.Result, result)
		}
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (b *browser) goTo(url string) {
	b.t.Helper()
	b.call("Page.navigate", map[string]any{"url": url}, nil)
}

// eval runs an expression in the page and decodes its value.
func (b *browser) eval(expression string, value any) error {
	var out struct {
		Result           struct{ Value json.RawMessage }
		ExceptionDetails *struct {
			Text      string
			Exception struct{ Description string }
		}
	}
	if err := b.try("Runtime.evaluate", map[string]any{"expression": expression, "returnByValue": true, "awaitPromise": true}, &out); err != nil {
		return err
	}
	if out.ExceptionDetails != nil {
		return fmt.Errorf("%s: %s", out.ExceptionDetails.Text, out.ExceptionDetails.Exception.Description)
	}
	if value == nil {
		return nil
	}
	return json.Unmarshal(out.Result.Value, value)
}

// until waits until an expression is true.
func (b *browser) until(what, expression string) {
	b.t.Helper()
	var last error
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	deadline := time.After(time.Minute)
	for {
		ok := false
		if last = b.eval(expression, &ok); last == nil && ok {
			return
		}
		select {
		case <-deadline:
			var text string
			_ = b.eval("document.body.innerText", &text)
			b.t.Fatalf("%s: not so after a minute (%v); the page says:\n%s", what, last, text)
		case <-tick.C:
		}
	}
}

// fill puts text into a field as keys would, without running it as code.
func (b *browser) fill(selector, text string) {
	b.t.Helper()
	b.do(fmt.Sprintf(`document.querySelector(%q).focus(); document.querySelector(%q).value = ''`, selector, selector))
	b.call("Input.insertText", map[string]any{"text": text}, nil)
}

func (b *browser) do(statement string) {
	b.t.Helper()
	if err := b.eval("(() => { "+statement+" })()", nil); err != nil {
		b.t.Fatalf("%s: %v", statement, err)
	}
}

func (b *browser) click(selector string) {
	b.t.Helper()
	b.do(fmt.Sprintf(`document.querySelector(%q).click()`, selector))
}

func (b *browser) screenshot() []byte {
	b.t.Helper()
	var out struct{ Data string }
	b.call("Page.captureScreenshot", map[string]any{"format": "png"}, &out)
	png, err := base64.StdEncoding.DecodeString(out.Data)
	if err != nil {
		b.t.Fatal(err)
	}
	return png
}

// complaints are what the page's console and exceptions said.
func (b *browser) complaints() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return append([]string(nil), b.said...)
}
