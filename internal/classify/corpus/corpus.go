// Package corpus writes labelled text: personal data in many languages, formats and places of a prompt (letters, chats, forms,
// tables, code, JSON, tool arguments), and text that only looks like it. The trainer of internal/classify and its tests call it.
//
// A Generator makes the same texts for the same seed. Nothing in them belongs to anybody: names are put together at random from
// the lexicon, numbers are drawn until their checksums hold. It is not safe for concurrent use.
package corpus

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/kinference/kinference/internal/classify"
)

// Span is a labelled stretch, in bytes. Labels are kinds (email, person, …),
// and place and organisation, which are no personal data.
type Span struct {
	Label      string
	Start, End int
}

// Doc is a labelled text.
type Doc struct {
	Text     string
	Spans    []Span
	Template string
}

// Generator makes texts.
type Generator struct {
	r                   *rand.Rand
	first, last, places []string // Latin
	scripts             map[string][2][]string
}

// New returns a generator for a seed.
func New(seed uint64) (*Generator, error) {
	g := &Generator{r: rand.New(rand.NewPCG(seed, 0x9e3779b9)), scripts: map[string][2][]string{}}
	words, err := classify.Words()
	if err != nil {
		return nil, err
	}
	for _, w := range words {
		r, _ := utf8.DecodeRuneInString(w.Text)
		if len(w.Text) < 3 {
			continue
		}
		script := name(r)
		switch {
		case script == "latin" && w.First:
			g.first = append(g.first, w.Text)
		case script == "latin" && w.Last:
			g.last = append(g.last, w.Text)
		case w.First || w.Last:
			p := g.scripts[script]
			if w.First {
				p[0] = append(p[0], w.Text)
			} else {
				p[1] = append(p[1], w.Text)
			}
			g.scripts[script] = p
		}
		if script == "latin" && w.Place && !w.Common {
			g.places = append(g.places, w.Text)
		}
	}
	return g, nil
}

func name(r rune) string {
	switch {
	case unicode.Is(unicode.Latin, r):
		return "latin"
	case unicode.Is(unicode.Greek, r):
		return "greek"
	case unicode.Is(unicode.Cyrillic, r):
		return "cyrillic"
	}
	return "other"
}

func (g *Generator) pick(list ...string) string { return list[g.r.IntN(len(list))] }
func (g *Generator) chance(p float64) bool      { return g.r.Float64() < p }

func title(s string) string {
	r, n := utf8.DecodeRuneInString(s)
	return string(unicode.ToUpper(r)) + s[n:]
}

// Digits replaces each # of a form by a digit, ~ by one from 1 to 9, @ by a
// capital letter and ^ by a small one.
func (g *Generator) Digits(form string) string {
	b := []byte(form)
	for i, c := range b {
		switch c {
		case '#':
			b[i] = '0' + byte(g.r.IntN(10))
		case '~':
			b[i] = '1' + byte(g.r.IntN(9))
		case '@':
			b[i] = 'A' + byte(g.r.IntN(26))
		case '^':
			b[i] = 'a' + byte(g.r.IntN(26))
		}
	}
	return string(b)
}

func (g *Generator) firstName() string { return title(g.first[g.r.IntN(len(g.first))]) }

func (g *Generator) lastName() string {
	l := title(g.last[g.r.IntN(len(g.last))])
	switch x := g.r.IntN(100); {
	case x < 3:
		return l + "-" + title(g.last[g.r.IntN(len(g.last))])
	case x < 5:
		return "Mc" + l
	case x < 7:
		return "O'" + l
	case x < 10:
		return g.pick("van ", "von ", "de ", "van der ", "di ", "del ", "el ", "bin ", "dos ", "la ") + l
	}
	return l
}

// Person is a name, in one of the ways in which it is written.
func (g *Generator) Person() string {
	switch x := g.r.IntN(100); {
	case x < 28:
		return g.firstName()
	case x < 70:
		return g.firstName() + " " + g.lastName()
	case x < 76:
		return g.firstName() + " " + string('A'+rune(g.r.IntN(26))) + ". " + g.lastName()
	case x < 80:
		return g.firstName() + " " + g.firstName() + " " + g.lastName()
	case x < 90:
		return g.lastName()
	case x < 93:
		return string('A'+rune(g.r.IntN(26))) + ". " + g.lastName()
	case x < 94:
		return g.lastName() + ", " + g.firstName()
	}
	if p := g.scripts[g.pick("greek", "cyrillic", "other")]; len(p[0]) > 0 && len(p[1]) > 0 {
		return title(p[0][g.r.IntN(len(p[0]))]) + " " + title(p[1][g.r.IntN(len(p[1]))])
	}
	return g.firstName() + " " + g.lastName()
}

func (g *Generator) place() string { return title(g.places[g.r.IntN(len(g.places))]) }

func (g *Generator) number(most int) string { return fmt.Sprint(1 + g.r.IntN(most)) }

func (g *Generator) street() string {
	n := g.pick(g.lastName(), g.firstName(), g.place(), g.pick("Main", "Oak", "Park", "Church", "High", "Station", "Mill", "Cedar", "Maple", "Elm", "King", "Queen", "Victoria", "Green", "Lake", "Hill", "Washington", "Sunset", "5th", "42nd", "North", "West End"))
	switch g.r.IntN(17) {
	case 0, 1, 2, 3, 4, 5:
		return g.number(9999) + " " + n + " " + g.pick("Street", "St", "St.", "Avenue", "Ave", "Road", "Rd", "Lane", "Ln", "Drive", "Dr", "Boulevard", "Blvd", "Court", "Way", "Place", "Terrace", "Crescent", "Close", "Square", "Parkway")
	case 6:
		return title(strings.ToLower(n)) + g.pick("straße", "strasse", "str.", "weg", "gasse", "platz", "allee", "straat", "laan", "gatan", "vägen", "gata", "gade", "vej", "veien", "plein", "gracht", " utca", " utca", "katu", "kuja") + " " + g.number(200)
	case 7:
		return g.number(200) + " " + g.pick("rue", "avenue", "boulevard", "allée", "impasse", "place", "chemin", "quai") + " " + g.pick("de ", "du ", "de la ", "des ", "") + n
	case 8:
		return g.pick("Via", "Viale", "Piazza", "Corso", "Calle", "Avenida", "Plaza", "Paseo", "Rua", "Travessa", "Av.", "C/") + " " + g.pick("", "de ", "di ", "del ", "da ") + n + g.pick(" ", ", ", " nº ") + g.number(200)
	case 9:
		return g.pick("ul.", "Ulica", "ulica", "al.", "Jalan", "Strada", "Trg", "Cesta", "Námestie", "náměstí") + " " + n + " " + g.number(200)
	case 10:
		return g.number(99) + " " + n + g.pick("straat", "weg", "gata", "gatan", "vej", "laan", "plaats", "plaatsen", "steenweg", "berg", "dorf", "skogen") + " " + g.number(300)
	case 11:
		return g.number(99) + " " + n + " " + g.lastName() + " " + g.number(99)
	case 12:
		return g.pick("P.O. Box ", "PO Box ", "Postfach ", "P.O.Box ", "Apartado ") + g.number(9999)
	case 13:
		return g.pick("Οδός ", "Οδ. ", "Λεωφόρος ") + g.scriptName("greek") + " " + g.number(200)
	case 14:
		return g.pick("ул. ", "улица ", "проспект ", "пр. ") + g.scriptName("cyrillic") + ", д. " + g.number(200)
	case 15:
		return "corner of " + n + " " + g.pick("Street", "St", "Avenue", "") + " and " + g.lastName() + " " + g.pick("Street", "St", "Avenue", "Road")
	}
	return g.number(999) + " " + n + " " + g.number(99)
}

func (g *Generator) scriptName(s string) string {
	if p := g.scripts[s]; len(p[1]) > 0 {
		return title(p[1][g.r.IntN(len(p[1]))])
	}
	return g.lastName()
}

// Address is a postal address, of one line or several.
func (g *Generator) Address() string {
	s := g.street()
	sep := g.pick(", ", "\n", "\n ", ", ", " ")
	var parts []string
	if g.chance(0.3) {
		parts = append(parts, g.pick("Suite ", "Apt. ", "Apt ", "Unit ", "Flat ", "Apartment #", "Floor ")+g.number(999))
	}
	if g.chance(0.65) {
		switch g.r.IntN(8) {
		case 0, 1:
			parts = append(parts, g.place()+", "+g.Digits("@@")+" "+g.Digits("#####"))
		case 2:
			parts = append(parts, g.Digits("#####")+" "+g.place())
		case 3:
			parts = append(parts, g.place(), g.place()+" "+g.Digits("#####"))
		case 4:
			parts = append(parts, g.place()+" "+g.Digits("@@~ ~@@"))
		case 5:
			parts = append(parts, g.Digits("~### @@")+" "+g.place())
		case 6:
			parts = append(parts, strings.ToUpper(g.place()), g.pick("", ", ")+g.Digits("@@"), g.Digits("#####"))
		case 7:
			parts = append(parts, g.place(), g.place())
		}
	}
	return strings.Join(append([]string{s}, parts...), sep)
}

// Email is an address.
func (g *Generator) Email() string {
	f, l := ascii(g.firstName()), ascii(g.lastName())
	local := g.pick(f+"."+l, f+l, f, l+g.number(99), f+"_"+l, string(f[0])+l, f+"+"+l, strings.ToLower(f)+g.number(1999))
	if g.chance(0.6) {
		local = strings.ToLower(local)
	}
	return local + "@" + strings.ToLower(ascii(g.lastName())) + g.pick(".com", ".de", ".org", ".co.uk", ".io", ".net", ".fr", ".gr", ".it", ".es", ".nl", ".com.br", ".pl", "mail.com", "-group.eu")
}

func ascii(s string) string {
	var b strings.Builder
	for _, r := range s {
		if r < 0x80 && (r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z') {
			b.WriteRune(r)
		}
	}
	if b.Len() == 0 {
		return "jo"
	}
	return b.String()
}

// Phone is a telephone number.
func (g *Generator) Phone() string {
	return g.Digits(g.pick("(~##) ~##-####", "~##-~##-####", "~##.~##.####", "+1-~##-~##-####", "+44 20 #### ####", "+44 7### ######", "0~## ### ####", "+49 ~## #######", "0~#/#######", "+33 6 ## ## ## ##", "0~ ## ## ## ##", "+34 ~## ### ###", "6## ### ###", "+39 3## ### ####", "+31 6 ########",
		"06-########", "+30 210 #######", "69########", "+48 ~## ### ###", "+46 70 ### ## ##", "+55 11 9####-####", "+91 ~#### #####", "+86 1## #### ####", "+81 90-####-####", "001-~##-~##-####", "(~##)~##-####", "+7 (9##) ###-##-##", "+90 5## ### ## ##", "+61 4## ### ###", "1-~##-~##-####"))
}

// Card is a payment card's number that passes Luhn's check.
func (g *Generator) Card() string {
	form := g.pick("4###############", "51##############", "55##############", "34#############", "37#############", "6011############", "4### #### #### ####", "5###-####-####-####", "3782 ###### #####", "2221############", "3056##########")
	for {
		s := g.Digits(form)
		var d []byte
		for i := range len(s) {
			if s[i] >= '0' && s[i] <= '9' {
				d = append(d, s[i])
			}
		}
		if classify.Card(d) {
			return s
		}
	}
}

// IBAN is a valid account number.
func (g *Generator) IBAN() string {
	n := classify.IBANLengths()
	country := g.pick("DE", "GB", "FR", "ES", "NL", "IT", "GR", "PL", "AT", "CH", "BE", "PT", "SE")
	form := country + map[string]string{"GB": "##@@@@", "NL": "##@@@@", "IT": "##@"}[country]
	form += strings.Repeat("#", n[country]-len(form))
	s := []byte(g.Digits(form))
	for c := range 97 {
		s[2], s[3] = '0'+byte((c+2)/10), '0'+byte((c+2)%10)
		if classify.IBAN(s) {
			break
		}
	}
	if g.chance(0.5) {
		return group(string(s), 4)
	}
	return string(s)
}

func group(s string, n int) string {
	var parts []string
	for len(s) > n {
		parts = append(parts, s[:n])
		s = s[n:]
	}
	return strings.Join(append(parts, s), " ")
}

// NationalID is a valid identity number of a kind.
func (g *Generator) NationalID(kind string) string { return classify.GenerateID(kind, g.r) }

// value fills one slot.
func (g *Generator) value(slot string) (label, v string) {
	switch slot {
	case "person":
		return "person", g.Person()
	case "first":
		return "person", g.firstName()
	case "last":
		return "person", g.lastName()
	case "full":
		return "person", g.firstName() + " " + g.lastName()
	case "address":
		return "address", g.Address()
	case "street":
		return "address", g.street()
	case "email":
		return "email", g.Email()
	case "phone":
		return "phone", g.Phone()
	case "card":
		return "card", g.Card()
	case "iban":
		return "iban", g.IBAN()
	case "ssn":
		return "national-id", g.Digits("~##-~#-####")
	case "ip":
		return "ip", fmt.Sprintf("%d.%d.%d.%d", 11+g.r.IntN(110), g.r.IntN(256), g.r.IntN(256), g.r.IntN(256))
	case "date":
		return "", g.pick(g.Digits("200#-0~-1#"), g.Digits("~/1#/19##"), g.pick("March", "May", "June", "April")+" "+g.number(28)+", "+g.Digits("20##"))
	case "city":
		return "place", g.place()
	case "country":
		return "place", g.pick("Germany", "France", "Japan", "Brazil", "Kenya", "the United States", "India", "Greece", "Poland", "Peru", "Norway", "Austria", "Bahamas", "Ecuador", "Turkey", "Chile")
	case "org":
		return "organisation", g.pick(g.lastName()+" "+g.pick("Ltd.", "Inc", "GmbH", "LLC", "Group", "Corp", "& Sons", "Industries", "Bank", "University", "Foundation"), g.pick("Apple", "Google", "Microsoft", "Amazon", "Netflix", "Toyota", "Siemens", "Spotify", "Facebook", "Twitter", "Walmart", "Nike", "Sony", "Samsung", "IBM", "Tesla", "Uber", "Visa", "Boeing", "Intel"),
			g.pick("Blue", "Solar", "Open", "North", "Silver", "Green", "Smart", "First")+g.pick(" Systems", " Labs", " Media", " Energy", " Partners", " Airlines", " Records", " Bank"))
	case "product":
		return "organisation", g.pick("iPhone", "Windows", "Photoshop", "PlayStation", "Corolla", "Kindle", "Xbox", "Galaxy", "Excel", "Kubernetes", "React", "Python", "Java", "Docker", "Linux", "Minecraft", "Monopoly", "Harvard Business Review", "Star Wars", "Game of Thrones", "The Great Gatsby", "Super Bowl", "World Cup", "Grammy")
	case "n":
		return "", g.number(99)
	case "year":
		return "", g.Digits("20##")
	case "money":
		return "", "$" + g.number(9999)
	case "weekday":
		return "", g.pick("Monday", "Tuesday", "Friday", "Sunday", "Saturday", "Thursday")
	}
	return "", "{" + slot + "}"
}

// Fill fills the slots of a template, such as "Hi {first}, call {phone}".
func (g *Generator) Fill(template string) Doc {
	var b strings.Builder
	d := Doc{Template: template}
	for {
		i := strings.IndexByte(template, '{')
		j := strings.IndexByte(template[max(i, 0):], '}')
		if i < 0 || j < 0 {
			b.WriteString(template)
			break
		}
		b.WriteString(template[:i])
		label, v := g.value(template[i+1 : i+j])
		if label != "" {
			d.Spans = append(d.Spans, Span{label, b.Len(), b.Len() + len(v)})
		}
		b.WriteString(v)
		template = template[i+j+1:]
	}
	d.Text = b.String()
	return d
}

// Doc is a text of a random template; some are in small or in capital letters
// only, as people write them.
func (g *Generator) Doc() Doc {
	d := g.Fill(Templates[g.r.IntN(len(Templates))])
	if g.chance(0.15) {
		n := g.Fill(Templates[g.r.IntN(len(Templates))])
		shift := len(d.Text) + 1
		d.Text += g.pick(" ", "\n") + n.Text
		for _, s := range n.Spans {
			d.Spans = append(d.Spans, Span{s.Label, s.Start + shift, s.End + shift})
		}
	}
	return g.Case(d)
}

// Case writes a document in small or capital letters, sometimes.
func (g *Generator) Case(d Doc) Doc {
	var f func(rune) rune
	switch x := g.r.IntN(100); {
	case x < 16:
		f = unicode.ToLower
	case x < 21:
		f = unicode.ToUpper
	default:
		return d
	}
	var b strings.Builder
	at := make(map[int]int, 2*len(d.Spans))
	for i, r := range d.Text {
		at[i] = b.Len()
		b.WriteRune(f(r))
	}
	at[len(d.Text)] = b.Len()
	spans := make([]Span, len(d.Spans))
	for i, s := range d.Spans {
		spans[i] = Span{s.Label, at[s.Start], at[s.End]}
	}
	d.Text, d.Spans = b.String(), spans
	return d
}
